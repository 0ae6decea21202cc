"""What all benchmarks share: cells, records, tables, and blocks that many measure."""
