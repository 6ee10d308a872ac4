#!/usr/bin/env bash
# docs/contracts.md pins every answer by tests: each name must be a test in tests/, and no row may be
# without one. Names are in backticks: `Suite.Test`, or `.Test` or `Test` after one with a suite.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
page=${1:-$root/docs/contracts.md}
known=$(cat "$root"/tests/*_test.cpp | tr '\n' ' ' |
  grep -oE 'TEST(_F|_P)?\( *[A-Za-z0-9_]+ *, *[A-Za-z0-9_]+ *\)' |
  sed -E 's/TEST(_F|_P)?\( *([A-Za-z0-9_]+) *, *([A-Za-z0-9_]+) *\)/\2.\3/')
failed=0 rows=0
while IFS= read -r line; do
  [[ $line =~ ^\|\ ([0-9]+)\ \| ]] || continue
  row=${BASH_REMATCH[1]} suite='' pins=0
  rows=$((rows + 1))
  pinned=${line%|}
  pinned=${pinned##*|}
  while IFS= read -r name; do
    name=${name//\`/}
    case $name in
      [A-Z]*.*) suite=${name%%.*} ;;                 # Suite.Test
      .*) name=$suite$name ;;                        # .Test
      [A-Z]*[A-Z]*) grep -q "^$name\." <<<"$known" && { suite=$name; continue; }  # `Suite`:
        name=$suite.$name ;;
      *) continue ;;                                 # an operation
    esac
    pins=$((pins + 1))
    if ! grep -qx "$name" <<<"$known"; then
      echo "contracts.md, row $row: there is no test $name"
      failed=1
    fi
  done < <(grep -oE '`[^`]+`' <<<"$pinned")
  if ((pins == 0)); then
    echo "contracts.md, row $row is pinned by no test"
    failed=1
  fi
done <"$page"
if ((rows < 18)); then
  echo "contracts.md has $rows rows, not 18"
  failed=1
fi
exit "$failed"
