/* Rounds, several a call: the same rounds that a caller would make one by one, so that what stands around a round in the caller's language is paid once
 * for all of them. Owns when to stop and the histories that grow meanwhile; a round itself is round.c's. */
#include <stdlib.h>
#include <string.h>

#include "round.h"

static bool is_stop(const bw24_round_request *r, int32_t token) {
    for (int i = 0; i < r->n_stop; i++)
        if (r->stop[i] == token) return true;
    return false;
}

/* what request r's last round gave goes to its log and history. Whether its reply ends with it */
static bool note(bw24_round_request *r, bw24_rounds_log *log) {
    bool ended = false;
    log->drafted[log->rounds] = r->drafted;
    log->accepted[log->rounds++] = r->accepted;
    memcpy(log->tokens + log->n_tokens, r->tokens, (size_t)(r->accepted + 1) * sizeof *r->tokens);
    log->n_tokens += r->accepted + 1;
    for (int i = 0; i <= r->accepted; i++) ended = ended || (r->synthetic <= 0 && is_stop(r, r->tokens[i]));
    if (r->n_history) memcpy((int32_t *)r->history + r->n_history, r->tokens, (size_t)(r->accepted + 1) * sizeof *r->tokens);
    if (r->n_history) r->n_history += r->accepted + 1;
    r->token = r->tokens[r->accepted];
    return ended;
}

/* one round of all. Whether the next may follow: nobody ended, each has room */
static int play(bw24_model *m, bw24_round_request *r, int n, const int64_t *until, bw24_rounds_log *logs, bw24_round_times *times, bool *on) {
    for (int i = 0; i < n; i++) r[i].accepted = -1;
    int rc = bw24_round(m, r, n, times);
    *on = !rc;
    for (int i = 0; i < n; i++) {
        if (r[i].accepted < 0) continue; /* has not moved */
        bool ended = note(&r[i], &logs[i]);
        *on = *on && !ended && bw24_drafter_pos(r[i].drafter) + 1 + r[i].k <= until[i];
    }
    return rc;
}

/* histories with room for what the rounds give, in place of the caller's; *mem is theirs, NULL where no request has one */
static int own_histories(bw24_round_request *r, int n, int most, int32_t **mem) {
    size_t need = 0, at = 0, room = (size_t)most * (BW24_MAX_DRAFTS + 1);
    for (int i = 0; i < n; i++) need += r[i].n_history > 0 ? (size_t)r[i].n_history + room : 0;
    *mem = need ? malloc(need * sizeof **mem) : NULL;
    if (need && !*mem) return bw_fail(BW24_E_MEMORY, "out of memory for the histories of %d replies", n);
    for (int i = 0; i < n; i++) {
        if (r[i].n_history <= 0) continue;
        memcpy(*mem + at, r[i].history, (size_t)r[i].n_history * sizeof **mem);
        r[i].history = *mem + at;
        at += (size_t)r[i].n_history + room;
    }
    return 0;
}

static int check(const bw24_round_request *r, int n, int most, const bw24_rounds_log *logs) {
    if (most < 1 || most > BW24_MAX_ROUNDS) return bw_fail(BW24_E_ARG, "bw24_rounds: %d rounds, expected 1..%d", most, BW24_MAX_ROUNDS);
    for (int i = 0; i < n; i++) {
        if (logs[i].size != sizeof logs[i]) return bw_fail(BW24_E_ARG, "bw24_rounds: log %d of size %u, expected %zu", i, logs[i].size, sizeof logs[i]);
        if (r[i].size != sizeof r[i]) return bw_fail(BW24_E_ARG, "a round: request %d of size %u, expected %zu", i, r[i].size, sizeof r[i]);
        if (r[i].n_history < 0 || (r[i].n_history && !r[i].history)) return bw_fail(BW24_E_ARG, "a round: request %d: its history is missing", i);
    }
    return 0;
}

int bw24_rounds(bw24_model *m, bw24_round_request *r, int32_t n, int32_t most, double seconds, const int64_t *until, const int32_t *end,
                bw24_rounds_log *logs, bw24_round_times *times) {
    if (!m || !r || !until || !logs || n < 1) return bw_fail(BW24_E_ARG, "bw24_rounds: NULL argument or no request");
    BW_TRY(check(r, n, most, logs));
    int32_t *mem;
    BW_TRY(own_histories(r, n, most, &mem));
    double stop = bw_round_clock() + seconds;
    bool on = true;
    int rc = 0, made = 0;
    for (int i = 0; i < n; i++) logs[i].rounds = logs[i].n_tokens = 0;
    while (on && made < most) {
        rc = play(m, r, n, until, logs, times, &on);
        made += !rc;
        if ((seconds > 0 && bw_round_clock() >= stop) || (end && __atomic_load_n(end, __ATOMIC_RELAXED))) break;
    }
    free(mem);
    return made && rc != BW24_E_CANCELLED ? 0 : rc;
}
