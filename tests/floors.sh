#!/usr/bin/env bash
# The house has floors: a folder of src/ includes only itself and the folders below it, and no public
# header includes anything of the house but public headers, or CUDA, MPI, NCCL or JSON.
set -euo pipefail
root=${1:-$(cd "$(dirname "$0")/.." && pwd)}
floors=(base layout ref cpu cuda ops comm nn attention model plan train)
failed=0

say() {
  echo "$1"
  failed=1
}

declare -A floor_of  # its number, from the ground
for i in "${!floors[@]}"; do floor_of[${floors[$i]}]=$i; done

for folder in "$root"/src/*/; do
  name=$(basename "$folder")
  [[ -n ${floor_of[$name]:-} ]] || say "src/$name is no floor that tests/floors.sh knows"
done

includes() { grep -rnoE '^ *# *include +["<][^">]+[">]' "$@" --include=*.h --include=*.cpp --include=*.cu; }

while IFS=: read -r file line include; do
  path=${include#*[\"<]}
  path=${path%[\">]}
  here=${file#"$root"/src/}
  above=${floor_of[${path%%/*}]:-}
  own=${floor_of[${here%%/*}]:-}
  if [[ -n $above && -n $own && $above -gt $own ]]; then
    say "src/$here:$line includes $path, which lies above ${here%%/*}"
  fi
  case $path in
    tests/* | bench/* | apps/*) say "src/$here:$line includes $path, which lies above src" ;;
  esac
done < <(includes "$root/src")

while IFS=: read -r file line include; do
  path=${include#*[\"<]}
  path=${path%[\">]}
  case $path in
    winnow/*) ;;
    */* | *cuda* | mpi.h | nccl.h) say "${file#"$root"/}:$line includes $path" ;;
  esac
done < <(includes "$root/include")
exit "$failed"
