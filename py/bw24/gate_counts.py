"""Recorded counts of rounds (scripts/record_rounds.py): (start of the model file's SHA-256, tokens of a reply) -> sampler -> depth ->
[rounds, drafted, accepted]. The gate compares them, so that a loss of acceptance, which no text shows, is seen. Knows nothing else."""

from __future__ import annotations

RECORDED: dict[tuple[str, int], dict[str, dict[int, list[int]]]] = {
    ("256bd7f3cc086bcd", 32): {
        "greedy": {
            1: [16, 16, 16],
            2: [11, 22, 21],
            3: [9, 27, 23],
            4: [8, 31, 24],
            5: [6, 30, 26],
            6: [6, 32, 26],
            7: [5, 35, 27],
            8: [5, 37, 27],
        },
        "seeded at temperature 0.7": {
            1: [17, 17, 14],
            2: [13, 25, 19],
            3: [11, 33, 20],
            4: [10, 40, 22],
            5: [10, 49, 22],
            6: [9, 52, 23],
            7: [9, 59, 23],
            8: [9, 66, 23],
        },
    },
    ("256bd7f3cc086bcd", 512): {
        "greedy": {
            1: [256, 256, 256],
            2: [171, 342, 341],
            3: [129, 387, 383],
            4: [104, 415, 408],
            5: [86, 430, 426],
            6: [74, 444, 438],
            7: [65, 455, 447],
            8: [58, 464, 454],
        },
        "seeded at temperature 0.7": {
            1: [259, 259, 252],
            2: [174, 348, 337],
            3: [134, 402, 377],
            4: [112, 445, 400],
            5: [95, 475, 416],
            6: [85, 505, 427],
            7: [74, 515, 438],
            8: [68, 544, 443],
        },
    },
}
