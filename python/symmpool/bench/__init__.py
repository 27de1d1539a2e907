"""Measures collectives beside their peers, in one run, in alternating rounds.

| module | holds |
| --- | --- |
| `cli` | options, and the order of things; `arguments`: what options may be |
| `session` | meeting, reporting and leaving, of every benchmark |
| `peers` | who is measured: ours and the others, each with its own memory |
| `alltoallv` | the same for all-to-alls; `matrices`: who sends how much to whom |
| `check` | random data, and whether results are right |
| `timing` | how a call is timed on a GPU and on the CPU |
| `table` | sizes and figures as people read them, the report as JSON |
| `plot` | the same as a picture |

Only `session`, `peers`, `check` and `timing` touch torch, and only when they are run.
"""
