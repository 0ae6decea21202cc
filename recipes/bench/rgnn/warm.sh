#!/bin/sh
# Compiles the benchmark's kernels in parallel on a small graph, into the compilers'
# disk caches, so that rgnn.layers spends its budget on measuring. Twelve processes.
out=$(mktemp -d)
ours="hector hector-none hector-compaction hector-reordering hector-both"
for model in rgcn rgat hgt; do
  for dtype in float32 bfloat16; do
    for task in inference training; do
      # shellcheck disable=SC2086 # a list of words
      python -m recipes.bench.rgnn.layers --scale 0.05 --graphs mutag --phases ablation main \
        --models "$model" --dtypes "$dtype" --tasks "$task" --contenders $ours \
        --budget-s "${1:-100}" --out "$out/$model-$dtype-$task.json" >/dev/null &
    done
  done
done
wait
grep -h -A1 '"failed"' "$out"/*.json | sort | uniq -c | sort -rn | head -20
rm -r "$out"
