#!/usr/bin/env bash
# Makes git run scripts/local_ci.sh before each push from this checkout. An existing hook of another origin is left alone.
set -euo pipefail
cd "$(dirname "$0")/.."
hook="$(git rev-parse --git-path hooks)/pre-push"
mark="# installed by scripts/install_hooks.sh"
if [ -e "$hook" ] && ! grep -qF "$mark" "$hook"; then
    echo "$hook exists and is not ours: left as it is" >&2
    exit 1
fi
mkdir -p "$(dirname "$hook")"
printf '%s\n' '#!/bin/sh' "$mark" 'exec scripts/local_ci.sh' > "$hook"
chmod +x "$hook"
echo "installed $hook"
