/* BLOCKS     up to 256 words of a row: a: bits of each block, with NEAR if its words are distances to those of the entry
              `second`; b: its least word; c: the bits (lanes.h) */

typedef struct {
    const u8 *from;
    i64 bits, base, near; /* near: whether its words are distances */
} Block;

/* The next block, of n words; the cursor moves over it. */
static Block block_next(Cursor *cursor, i64 n) {
    const Entry *entry = cursor->entry;
    const u8 *body = cursor->table->body;
    i64 said = number_at(body, &entry->a, cursor->a), bits = said & ~NEAR, numbers = block_numbers(n, bits);
    if (bits > 32 || numbers > entry->c.count - cursor->c) bits = numbers = 0;
    Block block = {body + entry->c.at + 4 * cursor->c, bits, number_at(body, &entry->b, cursor->a++), said & NEAR && entry->second >= 0};
    cursor->c += numbers;
    return block;
}

/* In blocks; `near` are the rows of another field with as many words, or NULL. */
static int blocks_encode(const Rows *rows, const Rows *near, Out *out, Entry *entry) {
    const BlockLoops *loops = block_loops();
    i64 size = rows->size, blocks = 0;
    for (i64 row = 0; row < rows->rows; row++) blocks += (row_length(rows, row) + BLOCK - 1) / BLOCK;
    u8 *widths = reserve(out, &entry->a, 1, blocks), *bases = widths ? reserve(out, &entry->b, size, blocks) : NULL;
    u8 *to = bases ? reserve(out, &entry->c, 4, 0) : NULL;
    if (!to) return FULL;
    for (i64 row = 0; row < rows->rows; row++) {
        i64 n = row_length(rows, row);
        const u8 *words = row_words(rows, row), *others = near && words ? row_words(near, row) : NULL;
        if (!words) return STRAY;
        for (i64 at = 0; at < n; at += BLOCK, bases += size) {
            u32 numbers[BLOCK], apart[BLOCK];
            i64 count = n - at < BLOCK ? n - at : BLOCK, least;
            i64 bits = bits_for(loops->above_least(size, words + at * size, count, &least, numbers)), apart_bits = 65;
            if (others) apart_bits = bits_for(loops->distances(size, words + at * size, others + at * size, count, apart));
            int by_distance = apart_bits < bits;
            if (by_distance) {
                bits = apart_bits;
                least = 0;
                entry->second = OF_JOB_NEAR;
            }
            if (bits > 32) return MISFIT;
            i64 nbytes = 4 * block_numbers(count, bits);
            if (out->used + nbytes > out->room) return FULL;
            pack_block(loops, by_distance ? apart : numbers, count, bits, to);
            *widths++ = (u8)(bits | (by_distance ? NEAR : 0));
            put_word(bases, least, size);
            to += nbytes;
            out->used += nbytes;
            entry->c.count += nbytes / 4;
        }
    }
    return FITS;
}

static int blocks_open(Cursor *cursor) { return !cursor->num_parts || cursor_reserve(cursor); }

static void blocks_decode(Cursor *cursor, i64 n, u8 *out) {
    const u8 *near = NULL;
    i64 size = cursor->entry->size;
    if (cursor->num_parts && cursor->parts->done) {
        near = row_before(cursor->parts);
        cursor->parts->row++;
    } else if (cursor->num_parts) {
        near = cursor->scratch;
        row_decode(cursor->parts, cursor->scratch);
    }
    for (i64 at = 0; at < n; at += BLOCK) {
        u32 words[BLOCK];
        i64 count = n - at < BLOCK ? n - at : BLOCK;
        Block block = block_next(cursor, count);
        unpack_block(cursor->loops, block.from, count, block.bits, words);
        if (block.near) cursor->loops->add_distances(size, words, near + at * size, count, out + at * size);
        else cursor->loops->add_least(size, words, block.base, count, out + at * size);
    }
}

static void blocks_skip(Cursor *cursor, i64 n) {
    for (i64 at = 0; at < n; at += BLOCK) block_next(cursor, n - at < BLOCK ? n - at : BLOCK);
}

static void blocks_cut(Entry *own, const Mark *from, const Mark *to) {
    array_cut(&own->a, from->a, to->a);
    array_cut(&own->b, from->a, to->a);
    array_cut(&own->c, from->c, to->c);
}

static int blocks_check(Check *check, i64 index, const Array *lengths, i64 rows, i64 total) {
    const Table *table = check->table;
    const Entry *entry = table->entries + index, *near = entry->second < 0 ? NULL : table->entries + entry->second;
    i64 blocks = count_pieces(table, entry, lengths, rows, BLOCK), block = 0, numbers = 0;
    if (entry->a.size != 1 || entry->a.count != blocks || entry->b.size != entry->size || entry->b.count != blocks) return 0;
    if (entry->c.size != 4) return 0;
    if (near && (near->layout != entry->layout || near->items != entry->items || near->size != entry->size)) return 0;
    for (i64 row = 0; row < rows && total; row++) {
        i64 n = row_elements(table, entry, lengths, row) * entry->items;
        for (i64 at = 0; at < n; at += BLOCK, block++) {
            i64 width = number_at(table->body, &entry->a, block);
            if ((width & ~NEAR) > 32 || (width & NEAR && !near)) return 0;
            numbers += block_numbers(n - at < BLOCK ? n - at : BLOCK, width & ~NEAR);
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

/* The table of the first block of each row; fields of a layout share it. */
static i64 block_begins(Stage *stage, const Entry *entry, const Extent *extent) {
    for (i64 at = 0; at < stage->num_sources; at++) {
        const Entry *other = stage->entries + stage->wanted[at].entry;
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
    source->more = entry->b.at;
    source->numbers = entry->c.at;
    source->begins = block_begins(stage, entry, extent);
    source->pieces = stage->used;
    i64 block = 0, number = 0;
    for (i64 row = 0; row < extent->rows; row++)
        for (i64 left = words_in(extent, entry, row); left > 0; left -= BLOCK) {
            i64 n = left < BLOCK ? left : BLOCK;
            add(stage, 512 * number + n);
            number += block_numbers(n, number_at(stage->body, &entry->a, block++) & ~NEAR);
        }
    if (entry->second < 0) return 1;
    Source near;
    if (!add_source(stage, entry->second, extent, &near)) return 0;
    source->near = stage->used;
    for (size_t at = 0; at < sizeof near / sizeof(i64); at++) add(stage, ((const i64 *)&near)[at]);
    return 1;
}

static void blocks_place(Placing *placing, Placed *placed, Entry *entry) {
    placed->each[0] = 1;
    placed->each[1] = entry->size;
    placed->each[2] = 4;
    place_array(placing, &entry->a, 1, placed->sums[0]);
    place_array(placing, &entry->b, entry->size, placed->sums[0]);
    place_array(placing, &entry->c, 4, placed->sums[2]);
}

static const Encoding BLOCKS_ENCODING = {
    .marked = 1, .encode = blocks_encode, .open = blocks_open, .decode = blocks_decode, .skip = blocks_skip, .cut = blocks_cut,
    .check = blocks_check, .is_odd = blocks_is_odd, .stage = blocks_stage, .place = blocks_place,
};
