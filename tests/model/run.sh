#!/bin/sh
# Checks a model with Spin: the protocol must hold, and every mutation of it must be caught. Usage: run.sh signals|membership|bootstrap
# Exit 77: Spin or a C compiler is missing.
set -u
folder=$(cd "$(dirname "$0")" && pwd)
model=$folder/$1.pml
command -v spin >/dev/null || { echo "skipped: spin is not installed (./dev setup installs it)"; exit 77; }
cc=${CC:-cc}
command -v "$cc" >/dev/null || { echo "skipped: no C compiler ($cc)"; exit 77; }
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

# check EXPECTED NAME FLAGS...: EXPECTED is ok or error. All run at once, each in a folder of its own, and say their line when they end.
check() {
  mkdir "$1 $2" && cd "$1 $2" || { touch failed; exit 1; }
  expected=$1 name=$2 optimise=-O2
  [ "$expected" = ok ] || optimise=-O1  # a mutation is found early: then compiling is what takes the time
  shift 2
  start=$(date +%s)
  spin -a "$@" "$model" >spin.log 2>&1 && "$cc" $optimise -w -DSAFETY -DCOLLAPSE -DMEMLIM=2500 -o pan pan.c || { cat spin.log; touch ../failed; exit 1; }
  ./pan -m10000 >pan.log 2>&1
  states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' pan.log)
  if grep -q "errors: 0" pan.log && ! grep -q -e "Search not completed" -e "max search depth too small" -e "out of memory" pan.log; then
    got=ok
  elif grep -q "errors: 1" pan.log; then
    got=error
  else
    got=incomplete
  fi
  why=$(sed -n 's/^pan:1: //p' pan.log | cut -c1-90)
  verdict=PASS
  [ "$got" = "$expected" ] || { verdict=FAIL; touch ../failed; cat pan.log; }
  echo "$verdict $name: expected $expected, got $got (${states:-?} states, $(($(date +%s) - start)) s) $why"
}

case $1 in
  signals)
    check ok    "protocol, users in order"           -DUSER=0 &
    check ok    "protocol, leases kept, any order"   -DUSER=1 &
    check ok    "protocol, own memory, any order"    -DUSER=2 &
    check ok    "protocol, consumed in epoch order"  -DUSER=2 -DORDERED=1 &
    check error "mutation 1, done is not looked at"  -DMUTATE=1 -DUSER=2 &
    check error "mutation 2, one copy too few"       -DMUTATE=2 -DUSER=0 &
    check error "mutation 3, offer before release"   -DMUTATE=3 -DUSER=1 &
    check error "mutation 4, rows raised too early"  -DMUTATE=4 -DUSER=0 &
    ;;
  membership)
    check ok    "agreement, a death and a zombie"             &
    check ok    "what a zombie may write, admission"          -DBLOCK=1 &
    check error "mutation 1, plans after its proposal"        -DMUTATE=1 &
    check error "mutation 2, commits after one proposal"      -DMUTATE=2 &
    check error "mutation 3, hears a rank that it removes"    -DMUTATE=3 &
    check error "mutation 4, decides by its own plan"         -DMUTATE=4 &
    check error "mutation 5, block used again too early"      -DMUTATE=5 -DBLOCK=1 &
    check error "mutation 6, admits before the fence"         -DMUTATE=6 -DBLOCK=1 &
    check error "mutation 7, a relay that nobody owes"        -DMUTATE=7 &
    ;;
  bootstrap)
    check ok    "steps, all live"                             -DCASE=0 &
    check ok    "steps, a rank dies and one finds out"        -DCASE=1 &
    check ok    "steps, anybody's time runs out"              -DCASE=2 &
    check ok    "the door, a death, a stranger"               -DJOIN=1 &
    check error "mutation 1, a key is erased too early"       -DMUTATE=1 &
    check error "mutation 2, who waits is not told"           -DMUTATE=2 -DCASE=1 &
    check error "mutation 3, no goodbye"                      -DMUTATE=3 &
    check error "mutation 4, a place for a hello"             -DMUTATE=4 -DJOIN=1 &
    check error "mutation 5, a proof may be repeated"         -DMUTATE=5 -DJOIN=1 &
    check error "mutation 6, a place is not free again"       -DMUTATE=6 -DJOIN=1 &
    ;;
  *) echo "no such model: $1"; exit 1 ;;
esac
wait
[ ! -e failed ]
