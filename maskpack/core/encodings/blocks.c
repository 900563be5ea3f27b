/* BLOCKS     up to 256 words of a row: a: bits of each block, with NEAR if its words are distances to those of the entry
              `second`, or CODED; b: its least word; c: the bits (lanes.h)

   The words of a coded block have different widths, four of them, which are the bytes of `number`, the first in the lowest:
   small words are frequent among token ids. Above the least word of the block, the first 2^w0 words have w0 bits, the next
   2^w1 words w1 bits, and so on. c: the codes, two bits each, CODES of them in a number, the first in the lowest bits; then
   the words, each above the first of its code, one behind the other. */

static Codes codes_of(i64 number) {
    Codes codes = {{0}, {0}, 0};
    for (int code = 0; code < 4; code++) {
        codes.widths[code] = number >> (8 * code) & 31;
        codes.firsts[code] = (u32)codes.end;
        codes.end += 1ull << codes.widths[code];
    }
    return codes;
}

/* The u32 numbers of a coded block, from how many words have each code. */
static i64 numbers_of_codes(const Codes *codes, i64 n, const i64 *counts) {
    i64 bits = 0;
    for (int code = 0; code < 4; code++) bits += counts[code] * codes->widths[code];
    return (n + CODES - 1) / CODES + (bits + 31) / 32;
}

/* The u32 numbers of the coded block of n words that lies at `from`; more than the `left` that are there if it lies beyond. */
static i64 coded_numbers(const u8 *from, i64 n, const Codes *codes, i64 left) {
    i64 counts[4] = {n, 0, 0, 0};
    if ((n + CODES - 1) / CODES > left) return left + 1;
    for (i64 at = 0; at < n; at += CODES) {
        u32 all = (u32)word_at(from + at / CODES * 4, 4), low, high;
        if (n - at < CODES) all &= (1u << 2 * (n - at)) - 1;
        low = all & 0x55555555u;
        high = all >> 1 & 0x55555555u;
        counts[1] += __builtin_popcount(low & ~high);
        counts[2] += __builtin_popcount(high & ~low);
        counts[3] += __builtin_popcount(low & high);
    }
    counts[0] -= counts[1] + counts[2] + counts[3];
    return numbers_of_codes(codes, n, counts);
}

/* The widths of codes for which rows take fewest bits, 0 if codes take no fewer bits by far. */
static i64 blocks_fit(const Rows *rows) {
    i64 counts[34] = {0}, below[34], most = 0, total = 0, number = 0, best, step = rows->rows / FIT_ROWS + 1;
    const WordLoops *loops = word_loops(block_loops(), rows->size);
    if (rows->items != 1) return 0; /* words of an element are not of one kind */
    for (i64 row = 0; row < rows->rows; row += step) {
        i64 n = row_length(rows, row);
        const u8 *words = row_words(rows, row);
        for (i64 at = 0; words && at + FEW_WORDS <= n && at < FIT_WORDS; at += BLOCK) {
            u32 numbers[BLOCK];
            i64 count = n - at < BLOCK ? n - at : BLOCK, least;
            i64 bits = bits_for(loops->above_least(words + at * rows->size, count, &least, numbers));
            if (bits > MOST_CODED) return 0;
            most = bits > most ? bits : most;
            for (i64 i = 0; i < count; i++) counts[bits_for(numbers[i])]++;
            total += count;
        }
    }
    below[0] = counts[0];
    for (i64 bits = 1; bits < 34; bits++) below[bits] = below[bits - 1] + counts[bits];
    best = total * most - total * most / 12;
    for (i64 a = 0; a < most; a++)
        for (i64 b = a + 1; b < most; b++)
            for (i64 c = b + 1; c < most; c++) {
                i64 second = below[b] + (counts[b + 1] >> (b - a)), third = below[c] + (counts[c + 1] >> (c - b));
                i64 bits = total * 2 + below[a] * a + (second - below[a]) * b + (third - second) * c + (total - third) * most;
                if (bits >= best) continue;
                best = bits;
                number = a | b << 8 | c << 16 | most << 24;
            }
    return number;
}

typedef struct {
    const u8 *from;
    i64 bits, numbers, base, near, coded; /* near: whether its words are distances */
} Block;

/* The next block, of n words; the cursor moves over it. */
static Block block_next(Cursor *cursor, i64 n) {
    const Entry *entry = cursor->entry;
    const u8 *body = cursor->table->body;
    i64 said = number_at(body, &entry->a, cursor->a), bits = said & (CODED - 1), left = entry->c.count - cursor->c;
    Block block = {body + entry->c.at + 4 * cursor->c, bits, 0, signed_at(body, &entry->b, cursor->a++), said & NEAR && entry->second >= 0, said & CODED};
    if (block.coded) {
        Codes codes = codes_of(entry->number);
        block.numbers = coded_numbers(block.from, n, &codes, left);
    } else block.numbers = block_numbers(n, bits);
    if (bits > 32 || block.numbers > left) block.bits = block.numbers = block.coded = 0;
    cursor->c += block.numbers;
    return block;
}

/* Its words, above the least or as distances. */
static void block_words(const Cursor *cursor, const Block *block, i64 n, u32 *words) {
    if (block->coded) {
        Codes codes = codes_of(cursor->entry->number);
        cursor->loops->unpack_codes(&codes, block->from, n, block->numbers, words);
    } else unpack_block(cursor->loops, block->from, n, block->bits, words);
}

/* Writes the next block, of n words, behind what `out` has; `said` is what it is, `least` its least word. `codes` and `others`,
   the words of another field, may be NULL. FITS, MISFIT or FULL. */
static int block_encode(const u8 *words, const u8 *others, i64 n, i64 size, const Codes *codes, Out *out, i64 *said, i64 *least) {
    const BlockLoops *loops = block_loops();
    u32 above[BLOCK], apart[BLOCK];
    u8 coded[4 * (BLOCK / CODES + BLOCK) + 8];
    i64 counts[5] = {0}, apart_bits = 65, bits = bits_for(word_loops(loops, size)->above_least(words, n, least, above));
    if (others) apart_bits = bits_for(word_loops(loops, size)->distances(words, others, n, apart));
    int by_distance = apart_bits < bits;
    if (by_distance) bits = apart_bits;
    if (bits > 32) return MISFIT;
    i64 numbers = block_numbers(n, bits), fewer = numbers;
    if (codes && !by_distance) {
        loops->count_codes(codes, above, counts);
        counts[0] -= BLOCK - n; /* behind the words are 0 */
        if (!counts[4]) fewer = numbers_of_codes(codes, n, counts);
    }
    int is_coded = 16 * fewer < 15 * numbers;
    if (is_coded) numbers = fewer;
    if (out->used + 4 * numbers > out->room) return FULL;
    u8 *to = out->memory + out->used;
    if (is_coded) {
        loops->pack_codes(codes, above, n, coded);
        memcpy(to, coded, 4 * (size_t)numbers);
    } else pack_block(loops, by_distance ? apart : above, n, bits, to);
    if (by_distance) *least = 0;
    *said = is_coded ? CODED : bits | (by_distance ? NEAR : 0);
    out->used += 4 * numbers;
    return FITS;
}

/* In blocks; `near` are the rows of another field with as many words, or NULL. */
static int blocks_encode(const Rows *rows, const Rows *near, Out *out, Entry *entry) {
    i64 size = rows->size, blocks = 0, said = 0, least;
    Codes codes = codes_of(entry->number);
    List bases = {0};
    int done = FITS;
    for (i64 row = 0; row < rows->rows; row++) blocks += (row_length(rows, row) + BLOCK - 1) / BLOCK;
    u8 *widths = reserve(out, &entry->a, 1, blocks), *begin = widths ? reserve(out, &entry->c, 4, 0) : NULL;
    if (!begin) return FULL;
    for (i64 row = 0; row < rows->rows && done == FITS; row++) {
        i64 n = row_length(rows, row);
        const u8 *words = row_words(rows, row), *others = near && words ? row_words(near, row) : NULL;
        if (!words) done = STRAY;
        for (i64 at = 0; at < n && done == FITS; at += BLOCK) {
            const u8 *beside = others ? others + at * size : NULL;
            done = block_encode(words + at * size, beside, n - at < BLOCK ? n - at : BLOCK, size, entry->number ? &codes : NULL, out, &said, &least);
            if (done == FITS && !push(&bases, least)) done = NO_MEMORY;
            if (said & NEAR) entry->second = OF_JOB_NEAR;
            *widths++ = (u8)said;
        }
    }
    entry->c.count = (out->memory + out->used - begin) / 4;
    if (done == FITS && !put_signed(out, &entry->b, &bases)) done = FULL;
    free(bases.numbers);
    return done;
}

static int blocks_open(Cursor *cursor) { return !cursor->num_parts || cursor_reserve(cursor); }

/* The words of the field that an entry is near to, in the row at its cursor, which moves on there; NULL for none. */
static const u8 *near_row(Cursor *cursor) {
    Cursor *near = cursor->parts;
    if (!cursor->num_parts) return NULL;
    if (!near->done) row_decode(near, cursor->scratch);
    else near->row++;
    return near->done ? row_before(near) : cursor->scratch;
}

static void blocks_decode(Cursor *cursor, i64 n, u8 *out) {
    const u8 *near = near_row(cursor);
    i64 size = cursor->entry->size;
    const WordLoops *loops = word_loops(cursor->loops, size);
    for (i64 at = 0; at < n; at += BLOCK) {
        u32 words[BLOCK];
        i64 count = n - at < BLOCK ? n - at : BLOCK;
        Block block = block_next(cursor, count);
        block_words(cursor, &block, count, words);
        if (block.near) loops->add_distances(words, near + at * size, count, out + at * size);
        else loops->add_least(words, block.base, count, out + at * size);
    }
}

static void blocks_skip(Cursor *cursor, i64 n) {
    for (i64 at = 0; at < n; at += BLOCK) block_next(cursor, n - at < BLOCK ? n - at : BLOCK);
}

static void blocks_cut(Entry *own, const Mark *from, const Mark *to) {
    array_cut(&own->a, from->a, to->a);
    array_cut_each(&own->b, from->a, to->a);
    array_cut(&own->c, from->c, to->c);
}

/* Whether these are widths of codes, or 0. */
static int codes_check(i64 number) {
    for (int code = 0; code < 4; code++)
        if ((number >> 8 * code & 255) > MOST_CODED) return 0;
    return number >> 32 == 0;
}

static int blocks_check(Check *check, i64 index, const Array *lengths, i64 rows, i64 total) {
    const Table *table = check->table;
    const Entry *entry = table->entries + index, *near = entry->second < 0 ? NULL : table->entries + entry->second;
    i64 blocks = count_pieces(table, entry, lengths, rows, BLOCK), block = 0, numbers = 0;
    Codes codes = codes_of(entry->number);
    if (entry->a.size != 1 || entry->a.count != blocks || entry->b.size > entry->size || !of_each(&entry->b, blocks)) return 0;
    if (entry->c.size != 4 || !codes_check(entry->number)) return 0;
    if (near && (near->layout != entry->layout || near->items != entry->items || near->size != entry->size)) return 0;
    for (i64 row = 0; row < rows && total; row++) {
        i64 n = row_elements(table, entry, lengths, row) * entry->items;
        for (i64 at = 0; at < n; at += BLOCK, block++) {
            i64 said = number_at(table->body, &entry->a, block), count = n - at < BLOCK ? n - at : BLOCK, left = entry->c.count - numbers;
            if (said & CODED ? said != CODED || !entry->number : (said & ~NEAR) > 32 || (said & NEAR && !near)) return 0;
            if (said & CODED) numbers += coded_numbers(table->body + entry->c.at + 4 * numbers, count, &codes, left);
            else numbers += block_numbers(count, said & ~NEAR);
            if (numbers > entry->c.count) return 0;
        }
    }
    return numbers == entry->c.count;
}

static int blocks_is_odd(Check *check, i64 index, const Array *lengths, i64 rows) {
    const Table *table = check->table;
    const Entry *entry = table->entries + index;
    u8 any = 0;
    if (entry->second >= 0) return 1; /* distances between bools are not written */
    Cursor cursor = cursor_of(table, index, NULL);
    for (i64 row = 0; row < rows_that_differ(entry, lengths, rows); row++)
        for (i64 left = row_elements(table, entry, lengths, row) * entry->items; left > 0; left -= BLOCK) {
            u8 words[BLOCK];
            i64 count = left < BLOCK ? left : BLOCK;
            blocks_decode(&cursor, count, words);
            for (i64 i = 0; i < count; i++) any |= words[i];
        }
    return any > 1;
}

/* Stages the field that an entry is near to, if there is one. */
static int stage_near(Stage *stage, const Entry *entry, const Extent *extent, Source *source) {
    Source near;
    if (entry->second < 0) return 1;
    if (!add_source(stage, entry->second, extent, &near)) return 0;
    source->near = stage->used;
    for (size_t at = 0; at < sizeof near / sizeof(i64); at++) add(stage, ((const i64 *)&near)[at]);
    return 1;
}

/* The table of the first block of each row; fields of a layout share it. */
static i64 block_begins(Stage *stage, const Entry *entry, const Extent *extent) {
    for (i64 at = 0; at < stage->num_sources; at++) {
        const Entry *other = stage->entries + stage->wanted[at];
        if (other->kind == BLOCKS && other->layout == entry->layout && other->items == entry->items && extent->table >= 0)
            return stage->sources[at].begins;
    }
    i64 begins = stage->used, block = 0;
    add(stage, 0);
    for (i64 row = 0; row < extent->rows; row++) add(stage, block += (words_in(extent, entry, row) + BLOCK - 1) / BLOCK);
    return begins;
}

static int blocks_stage(Stage *stage, const Entry *entry, const Extent *extent, Source *source) {
    source->kind = BY_BLOCK;
    source->more = stage->used;
    for (i64 block = 0; block < entry->a.count; block++) add(stage, signed_at(stage->body, &entry->b, block));
    source->numbers = entry->c.at;
    source->begins = block_begins(stage, entry, extent);
    source->pieces = stage->used;
    Cursor cursor = {.table = &(Table){.body = stage->body}, .entry = entry};
    for (i64 row = 0; row < extent->rows; row++)
        for (i64 left = words_in(extent, entry, row); left > 0; left -= BLOCK) {
            i64 n = left < BLOCK ? left : BLOCK;
            add(stage, 512 * cursor.c + n);
            block_next(&cursor, n);
        }
    return stage_near(stage, entry, extent, source);
}

static void blocks_place(Placing *placing, Placed *placed, Entry *entry) {
    placed->each[0] = 1;
    placed->each[2] = 4;
    place_array(placing, &entry->a, 1, placed->sums[0]);
    place_array(placing, &entry->c, 4, placed->sums[2]);
    placed->each[1] = place_between(placing, &entry->b, placed->sums[0], placed->low, placed->high, 1);
}

static const Encoding BLOCKS_ENCODING = {
    .marked = 1, .arrays = "acb", .once = "b", .is_signed = "b", .fit = blocks_fit,
    .encode = blocks_encode, .open = blocks_open, .decode = blocks_decode, .skip = blocks_skip, .cut = blocks_cut,
    .check = blocks_check, .is_odd = blocks_is_odd, .stage = blocks_stage, .place = blocks_place,
};
