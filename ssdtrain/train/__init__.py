"""The reference trainers: what `ssdtrain train` runs. Read down: `compose`, `settings`,
`trainer` (the run and its twin), `loop` (one run), `plain` and `pipeline` (one step),
`models` and `data`."""
