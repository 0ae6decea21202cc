"""The benchmarks, one package a subject: `python -m recipes.bench.<subject>.<name>`."""
