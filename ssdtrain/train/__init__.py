"""The reference trainers: what `ssdtrain train` runs.

Read down: `compose` (which config), `settings` (what it says), `trainer` (the run and
its twin without ssdtrain), `loop` (one run), `plain` and `pipeline` (one step),
`models` and `data` (what is trained, on what).
"""
