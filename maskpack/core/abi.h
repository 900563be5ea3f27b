/* What the core and Python share: numbers, structs and limits. `abi.py` is written from this file when the core is
   compiled (abi.py), so a line here is read on both sides. Structs hold 8 bytes a member: int64, addresses, and others
   of them. */

typedef int64_t i64;
typedef uint64_t u64;
typedef uint32_t u32;
typedef uint8_t u8;

/* What is under a mask: anything; a constant; the edge of the row; a constant a row; a zero a row, with either sign;
   zeros with any signs, of a field [B, width]. */
enum { NO_PAD, CONSTANT, BY_EDGE, BY_ROW, BY_SIGN, BY_SIGNS };
enum { TRUSTED = 8 }; /* added to one of these: the pads of rows are read, but not verified */

/* The pads of a field, a record for each row, or one for all of them: a byte, WORD or EDGE; the bytes of the word; and where
   some masked-out words are -0.0, a bit for each position that is, the first one in the highest bit. */
enum { WORD, EDGE };

/* What becomes of a field that is encoded. STRAY: a masked-out value is not its pad. FULL: the form fits, but takes too
   many bytes. ODD: bools of other bytes than 0 and 1. KEPT: it stays padded, because a masked-out value is not its pad. */
enum { FITS, MISFIT, STRAY, FULL, NO_MEMORY, ODD, KEPT };
enum { FAILED = -1, NO_ROOM = -2 };
enum { FLOATS, INTEGERS, BOOLS };
enum { AS_SPANS, AS_MASK, AS_PART }; /* how a layout is stored */

enum { MOST_PADS = 8 };
enum { MOST_STEPS = 8 };   /* from a field to fields that it is near to, or that it is put together from */
enum { FEW_COLUMNS = 16 }; /* words of an element that are a column each; of more, each index of its first dim is one */
enum { BLOCK = 256, NEAR = 128, CODED = 64 }; /* words of a block; bits that say that they are distances, or coded */
enum { COST_WORDS = 1048576 }; /* words that the cost of a form is for */
enum { CODES = 16 };                          /* codes of words in a number */

/* The encodings, and what the numbers `first` and `second` of an entry are: nothing; the entry of the rows that it stores;
   that of the first of its columns; another field; the field that it is near to, or -1. */
enum { NONE, OF_ROWS, OF_COLUMNS, OF_FIELD, OF_NEAR };
#define KINDS(X)              \
    X(PLAIN, NONE, NONE)      \
    X(BLOCKS, NONE, OF_NEAR)  \
    X(RLE, NONE, NONE)        \
    X(DELTA, NONE, NONE)      \
    X(SPARSE, OF_ROWS, OF_NEAR) \
    X(DICTIONARY, OF_ROWS, NONE) \
    X(COLUMNS, OF_COLUMNS, NONE) \
    X(CONCAT, OF_FIELD, OF_FIELD) \
    X(PIECES, OF_ROWS, NONE)

/* An array in a body: its first byte, bytes of a number, numbers. Where several equal numbers are needed, one may stand
   for all of them. */
typedef struct {
    i64 at, size, count;
} Array;

/* An encoded field, or a part of one: rows of `items` words of `size` bytes, times the tokens of its layout (-1: one). Its
   file in encodings/ says what its arrays, `number`, `first` and `second` are. */
typedef struct {
    i64 kind, layout, items, size, number, first, second;
    Array a, b, c;
} Entry;

/* A layout in a body. AS_SPANS: a: starts, b: counts, c: spans of each row. AS_MASK: a: a bit a position, the lowest of a
   byte first, rows from a new byte on. AS_PART: columns `low` on of the layout `parent`, which is stored before. */
typedef struct {
    i64 width, anchor, kind, parent, low;
    Array a, b, c;
} Stored;

/* The spans of rows: starts and counts of each, splits [rows + 1] into them, bounds [rows + 1] into packed tokens. */
typedef struct {
    i64 rows, width;
    const i64 *starts, *counts, *splits, *bounds;
} Layout;

enum { FEW_SPANS = 4 };

/* The scan of a row of a mask: its first spans, the word of its first valid token, and whether all its valid tokens are
   this word and all other bits are 0. */
typedef struct {
    i64 spans, tokens, alike;
    u64 value;
    i64 starts[FEW_SPANS], counts[FEW_SPANS];
} RowScan;

/* Where a layout of a batch comes from: the valid words of a mask [rows, width]; all words of a row up to its last valid
   one; the i64 offsets [rows + 1] of jagged values, of which there are `limit`; or a Layout. A word is valid if it has one of
   the significant bits. `trusts`: 1 + the job of the mask itself, whose pads need no check if all its valid words are equal
   and all others 0; 0 for none. */
enum { OF_MASK, OF_PREFIX, OF_OFFSETS, OF_LAYOUT };

typedef struct {
    const void *at;
    i64 size, rows, width, row_stride;
    u64 significant;
    i64 way, trusts, limit;
} Origin;

/* A layout of a batch: the tokens of an origin, or those in some of its columns if `low` is not negative. */
typedef struct {
    i64 origin, low, width;
} Cut;

/* A padded field and its packed values. `pads` are the records of its rows, `pads_size` bytes each and `pads_step` apart,
   whose signs are of positions `shift` columns before; `write` reads them. `read` verifies `mode` and `pad`, the word of a
   constant, and writes the records of BY_ROW, BY_SIGN and BY_SIGNS, whose words lie together. `is_expanded` if all elements
   of a row are the first one; `read` takes such a field. */
typedef struct {
    u8 *padded, *packed;
    i64 row_stride, outer, outer_stride, size, items, is_expanded, layout, mode;
    u64 pad[2];
    u8 *pads;
    i64 pads_size, pads_step, shift;
} Field;

/* A pad that may be under the mask. */
typedef struct {
    i64 mode;
    u64 pad[2];
} Trial;

/* How a field was encoded: what to try first the next time. `cost` is bytes for COST_WORDS words, `age` how often it was
   used. */
typedef struct {
    i64 kind, number, inner_kind, inner_number, cost, age;
} Form;

enum { MAY = 1, DID = 2 }; /* stay padded */

/* A field to be read or encoded, padded or packed (`field.packed` alone). What is read goes to `field.packed`, unless that is
   NULL, and records to `field.pads`. `near`, `head` and `tail` are jobs before it. `given` are the records of a packed field
   under a mask, `given_count` of `given_size` bytes. `keeps`: whether it may stay padded, MAY or DID the
   last time; it is contiguous then. `by_kernels`: whether kernels encode it the next time, which write no PIECES and no
   SPARSE. `result` is FITS, STRAY or KEPT if none of its pads is under its mask, ODD, or an error; `under_mask` is where its
   records are then; `pad` is the pad that is, `count` entries from `first` on are its own, and the last of them is the field. */

typedef struct {
    Field field;
    i64 padded, layout, items, size, rows;
    const u8 *given;
    i64 given_size, given_count;
    i64 integers, hints, near, head, tail, columns, keeps, by_kernels, num_pads;
    Trial pads[MOST_PADS];
    Form form;
    i64 result, pad, first, count;
    Array under_mask;
} Job;

/* The rows of one body. `marks` says where they begin (maskpack_mark); without it, they are read one after the other. */
typedef struct {
    const Entry *entries;
    const Layout *layouts;
    const u8 *body;
    i64 rows, dense_rows;
    const i64 *marks;
} Table;

/* A part that is decoded: a table, which of its rows, and which rows of the result they are; NULL for all in order. */
typedef struct {
    Table table;
    const i64 *taken, *places;
    i64 count;
} Given;

/* A field to be decoded from one part: padded, or `packed` alone, whose rows lie as those of `field.layout`, -1 for rows of
   one element. */
typedef struct {
    Field field;
    i64 padded, entry, part;
} Target;

/* ------------------------------------------------------------------ decoding on a device (packed/cuda/job_table.py) */

/* How its kernel finds a word. FROM_TABLE: the table itself. */
enum { BY_PLACE, BY_PIECE, BY_BLOCK, FROM_TABLE };

typedef struct {
    i64 tokens, longest, bounds, splits, starts, ends;
} Axis;

typedef struct {
    i64 kind, rows, begins, begin_unit, data, data_size, more, number, single, pieces, counts, sums, numbers, near, stretches, stretch_starts, stretch_ends;
} Source;

/* ------------------------------------------------------------------ encoding on a device (packed/cuda/encode.py) */

/* The words of a field, or of one of its columns, and their form.
   kind: PLAIN to CONCAT; of DICTIONARY, the form of the stored rows.
   words, size: address of the tensor, and bytes of its words.
   items, stride, offset: words of an element that the unit has, words of the whole element, and the first of them.
   rows: how many.
   bounds: number of the layout, whose table says where rows begin and end in packed values; -1 if each row is one element.
   row_stride: words from one row to the next in a padded tensor.
   counts, low, width: of a padded tensor, the address of int32 [3, rows]: valid tokens of its mask, spans (at most one) and
     first valid position; and the columns of the mask that it has. Address 0 for packed values.
   number: widths of codes of BLOCKS.
   near, head, tail: the units that a field is near to, or put together from; -1 for none.
   bools: the bits that no bool has, 0 for other words.
   pad_mode, pad: what is under the mask of a padded tensor, and the word of a constant.
   b_size, c_size: bytes of the numbers of arrays b and c; 0 if the kernel does not write the array. */
typedef struct {
    i64 kind, words, size, items, stride, offset, rows, bounds, row_stride, counts, low, width, number;
    i64 near, head, tail, bools, pad_mode, pad, b_size, c_size;
} Unit;

/* What is known of a row of a unit.
   flags: IS_MISFIT, its words do not fit the form; IS_ODD, bytes of bools are not 0 and 1; NEAR_USED, some block has
     distances; IS_STRAY, something under the mask is not the pad.
   total: numbers of the bits of all blocks; stretches of RLE and DELTA.
   low, high: least and largest word of the stretches or blocks.
   least, most: of the lengths of all stretches but the last of the row.
   hash: of all words; equal rows have the same. CONCAT has the flags alone. */
typedef struct {
    i64 flags, total, low, high, least, most, hash;
} Stat;

enum { IS_MISFIT = 1, IS_ODD = 2, NEAR_USED = 4, IS_STRAY = 8 }; /* flags of a Stat */

/* Where the parts of arrays a, b and c that belong to a row begin, and what becomes of the row: WRITTEN, LEFT_OUT, or it
   equals the row with this number, unit * rows + row. */
typedef struct {
    i64 at[3], way;
} Spot;

enum { WRITTEN = -1, LEFT_OUT = -2 };

/* A field: `units` units from `first` on, and the fields that it refers to, which are before it, or -1. `entry` is its entry
   then, -1 if it does not fit. */
typedef struct {
    i64 kind, first, units, layout, items, size, near, head, tail, cost, entry;
} Settled;

/* An array that was written by the host: `nbytes` bytes from `from` on belong to the byte `at` of the body. */
typedef struct {
    i64 at, from, nbytes;
} Small;
