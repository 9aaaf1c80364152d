#!/bin/sh
# Measures mpi_alltoallv with each shared-memory mechanism that this Open MPI has, and keeps the best of each case.
# Usage: run_mpi.sh PROGRAM OUTPUT.json [RANKS]
set -eu
program=$1 output=$2 ranks=${3:-2}
version=$(mpirun --version | sed -n 's/.*Open MPI) \([0-9]*\).*/\1/p')
root=""
[ "$(id -u)" != 0 ] || root="--allow-run-as-root"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for mechanism in cma none; do
  if [ "${version:-4}" -ge 5 ]; then
    [ "$mechanism" = cma ] && options="--mca btl self,sm --mca smsc cma" || options="--mca btl self,sm --mca btl_sm_use_smsc 0"
    name=sm/$mechanism
  else
    options="--mca btl self,vader --mca btl_vader_single_copy_mechanism $mechanism"
    name=vader/$mechanism
  fi
  # shellcheck disable=SC2086
  mpirun $root --oversubscribe --mca pml ob1 $options -n "$ranks" "$program" --mechanism "$name" --json "$work/$mechanism.json" ||
    echo "run_mpi.sh: $name does not work here" >&2
done
python3 - "$output" "$work"/*.json <<'PYTHON'
import json, sys
reports = [json.load(open(path)) for path in sys.argv[2:]]
best = {}
for report in reports:
    for case in report["cases"]:
        key = (case["op"], case["tokens"], case["hidden"])
        if key not in best or case["p50_us"] < best[key]["p50_us"]:
            best[key] = case
merged = dict(reports[0], command="bench/compare/run_mpi.sh", cases=list(best.values()))
json.dump(merged, open(sys.argv[1], "w"), indent=1)
for case in merged["cases"]:
    print("best: %-8s %5d tokens of %5d: p50 %.1f us, p99 %.1f us (%s)" %
          (case["op"], case["tokens"], case["hidden"], case["p50_us"], case["p99_us"], case["transport"]))
PYTHON
