"""Finding the fastest config for a GPU and a problem: `flashwright tune`.

`candidates` compiles what is worth trying, `measure` checks and times it on the GPU, `search` decides what to time,
`journal` keeps what was measured; `choice` finds the results for `attention()`.
"""
