/* The compiled core of maskpack: one pass over memory for each thing that is done to a batch.

   abi.h         what Python knows of it, too          encodings/    how rows of words become arrays: a file for each
   scan.c        a mask to its spans                   choose.c      which encoding takes fewest bytes
   padded.c      padded fields to packed values, and   encode.c      a batch to a table and a body
                 back; every pad is verified           decode.c      a table and a body to fields
   layouts.c     layouts, stored and read              rows.c        parts of a table, without decoding
   slices.c      rows of a field, by several threads   check.c       tables from elsewhere
   prefixes.c    rows in the order of a trie           stage.c, place.c  what kernels on a device need of the host
   palette.c     words as numbers of distinct ones

   Functions take int64 numbers, addresses among them, and tables whose rows are jobs. They keep no state, call nothing
   back and hand out no memory. Python builds the tables (native.py), checks what it is given and writes the messages.
   All is compiled as one file (build.py).

   A word has 1, 2, 4, 8 or 16 bytes. An element of a field has `items` words that lie together at each position, and
   `outer` of these groups that lie apart, where dims stand before the width: [B, outer, S, items]. Packed values are
   [T, outer, items]. */

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define API __attribute__((visibility("default")))
#ifndef ABI_VERSION /* build.py says them */
#define ABI_VERSION 0
#define STRUCT_SIZES 0
#endif

#include "abi.h"
#include "words.h"
#include "threads.h"
#include "scan.c"
#include "padded.c"
#include "encodings/lanes.h"
#include "encodings/encoding.h"
#include "layouts.c"
#include "place.h"

#include "encodings/plain.c"
#include "encodings/blocks.c"
#include "encodings/stretches.c"
#include "encodings/dictionary.c"
#include "encodings/pieces.c"
#include "encodings/sparse.c"
#include "encodings/columns.c"
#include "encodings/concat.c"

#define ENCODING_OF(NAME, first, second) &NAME##_ENCODING,
static const Encoding *const ENCODINGS[NUM_KINDS] = {KINDS(ENCODING_OF)};

#include "choose.c"
#include "slices.c"
#include "encode.c"
#include "decode.c"
#include "rows.c"
#include "check.c"
#include "stage.c"
#include "place.c"
#include "prefixes.c"
#include "palette.c"

/* What Python compares with its own side: the version of both, and the bytes of the structs of abi.h. */
API i64 maskpack_version(void) { return ABI_VERSION; }

API i64 maskpack_size(i64 number) {
    static const i64 sizes[] = {STRUCT_SIZES};
    return sizes[number];
}

/* Whether the decode kernel reads an encoding from one place (stage.c). */
API i64 maskpack_is_staged(i64 kind) { return ENCODINGS[kind]->stage != NULL; }
