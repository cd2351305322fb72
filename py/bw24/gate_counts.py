"""Recorded counts of rounds (scripts/record_rounds.py): (start of the model file's SHA-256, tokens of a reply) -> sampler -> depth ->
[rounds, drafted, accepted]. The gate compares them, so that a loss of acceptance, which no text shows, is seen. Knows nothing else."""

from __future__ import annotations

RECORDED: dict[tuple[str, int], dict[str, dict[int, list[int]]]] = {
    ("9e2e54d2932d9b1c", 32): {
        "greedy": {
            1: [19, 19, 12],
            2: [14, 28, 17],
            3: [12, 35, 20],
            4: [11, 41, 21],
            5: [10, 50, 21],
            6: [10, 60, 22],
            7: [10, 69, 22],
            8: [10, 78, 22],
        },
        "seeded at temperature 0.7": {
            1: [17, 17, 15],
            2: [16, 31, 16],
            3: [13, 36, 19],
            4: [13, 47, 19],
            5: [12, 53, 20],
            6: [11, 56, 21],
            7: [11, 63, 21],
            8: [11, 70, 21],
        },
    },
    ("9e2e54d2932d9b1c", 512): {
        "greedy": {
            1: [259, 259, 252],
            2: [174, 348, 337],
            3: [132, 396, 380],
            4: [107, 428, 405],
            5: [90, 450, 421],
            6: [79, 471, 433],
            7: [70, 490, 442],
            8: [64, 506, 448],
        },
        "seeded at temperature 0.7": {
            1: [282, 282, 229],
            2: [214, 427, 297],
            3: [180, 539, 332],
            4: [161, 641, 350],
            5: [147, 731, 364],
            6: [140, 833, 371],
            7: [134, 932, 377],
            8: [131, 1040, 380],
        },
    },
}
