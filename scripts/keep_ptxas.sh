#!/bin/sh
# keep_ptxas.sh nvcc ...: runs the compiler; what ptxas says of resources goes into OBJECT.ptxas, all else to stderr.
object=
previous=
for word in "$@"; do
  if [ "$previous" = -o ]; then object=$word; fi
  previous=$word
done
case $object in
  *.o) ;;
  *) exec "$@" ;;
esac
log=$object.log.$$
"$@" 2>"$log"
status=$?
resources='^ptxas info|^    [0-9]+ bytes stack frame'
grep -E "$resources" "$log" >"$object.ptxas"
grep -Ev "$resources" "$log" >&2
rm -f "$log"
exit $status
