#!/usr/bin/env bash
# avx2_symbols.sh LIBRARY: no function compiled for AVX2 may be a weak symbol that plain code could
# define too. The linker keeps one of them, and on an older processor the program would stop at an
# illegal instruction. A name that holds winnow::cpu::avx2 cannot be meant by plain code.
set -euo pipefail
symbols=$(nm -C --defined-only "$1")
if ! grep -q 'winnow::cpu::avx2' <<<"$symbols"; then
  echo "$1 holds no symbol of winnow::cpu::avx2: is it the AVX2 library?" >&2
  exit 1
fi
# DW.ref.*: a pointer to the exception handler of the language, no code.
leaks=$(awk '$2 ~ /^[WVu]$/' <<<"$symbols" | grep -v -e 'winnow::cpu::avx2' -e ' DW\.ref\.' || true)
if [[ -n $leaks ]]; then
  echo "Compiled for AVX2, and open to be picked by the linker for plain code:" >&2
  echo "$leaks" >&2
  exit 1
fi
