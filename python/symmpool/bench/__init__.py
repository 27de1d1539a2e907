"""Measures symmpool's collectives and those of other libraries in one run, in alternating rounds.

| module | what it has |
| --- | --- |
| `cli` | the command line, and `bench allreduce`; `arguments`: types of options |
| `collectives`, `hosts`, `alltoallv`, `overlap` | the other benchmarks; `matrices`: traffic matrices |
| `session` | what every benchmark does at its beginning and end |
| `peers` | the contenders: symmpool and other libraries, each with its own memory |
| `rounds` | the order in which contenders are measured |
| `check` | random data, and whether results are right |
| `timing` | how a call is timed on a GPU and on the CPU |
| `table` | sizes and figures for people, and the report as JSON |
| `plot` | results as a picture |

Only `session`, `peers`, `check` and `timing` touch torch, and only when they are run.
"""
