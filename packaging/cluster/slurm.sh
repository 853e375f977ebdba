#!/bin/bash
# A search on Slurm: sbatch slurm.sh pipeline.yaml
# Task 0 runs the search and writes its result, the others run trials for it. A task that fails or is preempted is
# queued again; its trial is run again from its last complete stage. STORAGE is the database
# (postgresql+psycopg://…; a file with it that only you can read is better than the command line), RUNS a folder that
# all nodes mount. All nodes use one environment: with torch, the sampler is another one.
#SBATCH --job-name=coralline-search
#SBATCH --array=0-7
#SBATCH --cpus-per-task=2
#SBATCH --mem=4G
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --signal=B:INT@60
#SBATCH --output=search-%A_%a.log
set -euo pipefail

: "${STORAGE:?the URL of the database}" "${RUNS:?a folder that all nodes mount}"
join=(--join)
if [ "$SLURM_ARRAY_TASK_ID" = 0 ]; then join=(); fi
exec python -m compress search "$1" --storage "$STORAGE" --out "$RUNS" "${join[@]}"
