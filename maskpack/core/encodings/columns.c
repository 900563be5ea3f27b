/* COLUMNS    the words of an element in `number` columns of equally many: entries from `first` on */

/* Prefetches part `part` of `parts` of the tile behind the one at p, which has so many bytes. */
static void prefetch(const u8 *p, i64 nbytes, i64 part, i64 parts) {
    for (i64 at = nbytes * part / parts; at < nbytes * (part + 1) / parts; at += 64) __builtin_prefetch(p + nbytes + at);
}

/* The words of the blocks of one column in some tokens of a row: to `line`, one behind the other. */
static void column_words(u8 *line, const u8 *words, const Rows *rows, i64 columns, i64 column, i64 tokens) {
    i64 element = rows->items * rows->size, own = element / columns;
    copy_apart(line, own, words + column * own, element, tokens, own);
}

/* The entry of a field whose columns are the entries before it. */
static void columns_close(Entry *slots, i64 columns, i64 layout, const Rows *rows) {
    slots[columns] = entry_of(COLUMNS, layout, rows->items, rows->size);
    slots[columns].number = columns;
    slots[columns].first = 0;
}

/* Packed values in a few columns, each in the form that is best for it: columns + 1 entries. */
static int columns_choose(const Rows *rows, i64 columns, int integers, Out *out, Entry *slots) {
    i64 tokens = total_words(rows) / rows->items, layout = slots->layout;
    u8 *column = malloc((size_t)(tokens * rows->items / columns * rows->size + 8));
    int done = column ? FITS : NO_MEMORY;
    Form unused;
    for (i64 i = 0; i < columns && done == FITS; i++) {
        Rows one = *rows;
        column_words(column, rows->values, rows, columns, i, tokens);
        one.values = column;
        one.items = rows->items / columns;
        slots[i] = entry_of(PLAIN, layout, one.items, rows->size);
        done = choose(&one, NULL, 0, integers, out, slots + i, &unused);
    }
    columns_close(slots, columns, layout, rows);
    free(column);
    return done;
}

/* What the blocks of columns are written with: `way` 0 counts their bits, 1 writes their words. */
typedef struct {
    const Rows *rows;
    const BlockLoops *loops;
    Out *out;
    Entry *slots;
    i64 columns, items, way; /* items: words of an element in a column */
    int whole;               /* whether a tile is one block of each column */
    u8 *line, *low, *high;
    i64 *bases, blocks; /* the least words of the blocks of each column, so many of them */
} Tiles;

/* The blocks of one column in n tokens of a row, which lie at `from`; the first of them is number `index`. False if its words are too far apart. */
static int column_encode(const Tiles *tiles, i64 column, const u8 *from, i64 n, i64 index) {
    const WordLoops *loops = word_loops(tiles->loops, tiles->rows->size);
    Entry *own = tiles->slots + column;
    Out *out = tiles->out;
    i64 size = tiles->rows->size, items = tiles->items, element = tiles->rows->items * size, fits = 1;
    int direct = tiles->whole && (!tiles->way || items == EIGHT);
    if (!direct) column_words(tiles->line, from, tiles->rows, tiles->columns, column, n);
    for (i64 word = 0; word < n * items; word += BLOCK, index++) {
        i64 count = n * items - word < BLOCK ? n * items - word : BLOCK, least;
        u8 *width = out->memory + (own->a.at - out->base) + index;
        i64 *base = tiles->bases + column * tiles->blocks + index;
        u32 numbers[BLOCK];
        u64 most = 0;
        if (!direct) most = loops->above_least(tiles->line + word * size, count, &least, numbers);
        else if (tiles->way) loops->less(from + column * items * size, element, n, *base, numbers);
        else most = loops->range(tiles->low + column * items * size, tiles->high + column * items * size, items, &least);
        if (tiles->way) pack_block(tiles->loops, numbers, count, *width, out->memory + (own->c.at - out->base) + 4 * own->c.count);
        else {
            fits &= bits_for(most) <= 32;
            *width = (u8)bits_for(most);
            *base = least;
        }
        own->c.count += block_numbers(count, *width);
    }
    return (int)fits;
}

/* One way over all rows, some tokens at a time. */
static int tiles_encode(const Tiles *tiles) {
    const Rows *rows = tiles->rows;
    i64 element = rows->items * rows->size, tile = tile_tokens(tiles->items), block = 0;
    int fits = 1;
    for (i64 row = 0; row < rows->rows; row++) {
        i64 tokens = row_length(rows, row) / rows->items;
        const u8 *words = row_words(rows, row);
        if (!words) return STRAY;
        for (i64 at = 0; at < tokens; at += tile) {
            i64 n = tokens - at < tile ? tokens - at : tile;
            const u8 *from = words + at * element;
            if (tiles->whole && !tiles->way) word_loops(tiles->loops, rows->size)->ends(from, n, rows->items, tiles->low, tiles->high);
            for (i64 column = 0; column < tiles->columns; column++) {
                if (tiles->way && tokens - at >= 2 * tile) prefetch(from, tile * element, column, tiles->columns);
                fits &= column_encode(tiles, column, from, n, block + at * tiles->items / BLOCK);
            }
            if (!fits) return MISFIT;
        }
        block += (tokens * tiles->items + BLOCK - 1) / BLOCK;
    }
    return FITS;
}

/* In `number` columns of blocks each: an entry more than columns. Rows are read twice, some tokens at a time, for the bits of
   all blocks and then for their words: what is packed goes to its place at once. */
static int columns_encode(const Rows *rows, const Rows *near, Out *out, Entry *slots) {
    i64 columns = slots->number, layout = slots->layout, blocks = 0;
    i64 size = rows->size, items = rows->items / columns, element = rows->items * size;
    for (i64 row = 0; row < rows->rows; row++) blocks += (row_length(rows, row) / columns + BLOCK - 1) / BLOCK;
    for (i64 column = 0; column < columns; column++) {
        Entry *own = slots + column;
        *own = entry_of(BLOCKS, layout, items, size);
        if (!reserve(out, &own->a, 1, blocks)) return FULL;
    }
    columns_close(slots, columns, layout, rows);
    i64 tile = tile_tokens(items);
    u8 *line = malloc((size_t)(tile * items * size + 2 * element)), *low = line + tile * items * size;
    i64 *bases = malloc((size_t)(columns * blocks + 1) * sizeof(i64));
    Field field;
    Rows again = rows_verified(rows, &field);
    Tiles tiles = {rows, block_loops(), out, slots, columns, items, 0, BLOCK % items == 0, line, low, low + element, bases, blocks};
    int done = line && bases ? tiles_encode(&tiles) : NO_MEMORY;
    for (i64 column = 0; column < columns && done == FITS; column++) {
        List own = {bases + column * blocks, blocks, blocks};
        if (!reserve(out, &slots[column].c, 4, slots[column].c.count) || !put_signed(out, &slots[column].b, &own)) done = FULL;
        slots[column].c.count = 0; /* counted again, as it is written */
    }
    tiles.rows = &again;
    tiles.way = 1;
    if (done == FITS) done = tiles_encode(&tiles);
    free(bases);
    free(line);
    return done;
}

/* Whether the words of a row can be decoded piece by piece. */
static int has_pieces(const Cursor *cursor) {
    i64 kind = cursor->entry->kind;
    return !cursor->done && (kind == PLAIN || (kind == BLOCKS && cursor->entry->second < 0));
}

/* The block of the next n tokens, of EIGHT words each, which go `step` bytes apart. */
static void next_eights(Cursor *cursor, i64 n, u8 *out, i64 step) {
    u32 words[BLOCK];
    Block block = block_next(cursor, n * EIGHT);
    if (n * EIGHT == BLOCK) prefetch(block.from, 4 * block.numbers, 0, 1); /* as the next one is likely as long */
    block_words(cursor, &block, n * EIGHT, words);
    word_loops(cursor->loops, cursor->entry->size)->more(words, block.base, n, out, step);
}

static int columns_open(Cursor *cursor) { return cursor_reserve(cursor); }

/* Columns of many words are decoded some tokens at a time, so that what is written stays in the first cache. */
static void columns_decode(Cursor *cursor, i64 n, u8 *out) {
    const Entry *entry = cursor->entry;
    i64 columns = entry->number, items = entry->items / columns, size = entry->size, element = entry->items * size;
    i64 tokens = n / entry->items, tile = tokens, pieces = 1;
    for (i64 column = 0; column < columns && pieces; column++) pieces = has_pieces(cursor->parts + column);
    if (pieces) tile = tile_tokens(items);
    for (i64 at = 0; at < tokens; at += tile) {
        i64 count = tokens - at < tile ? tokens - at : tile;
        for (i64 column = 0; column < columns; column++) {
            Cursor *part = cursor->parts + column;
            if (pieces && items == EIGHT && part->entry->kind == BLOCKS) {
                if (tokens - at >= 2 * tile) prefetch(out + at * element, tile * element, column, columns);
                next_eights(part, count, out + at * element + column * items * size, element);
                continue;
            }
            if (pieces) ENCODINGS[part->entry->kind]->decode(part, count * items, cursor->scratch);
            else row_decode(part, cursor->scratch);
            copy_apart(out + at * element + column * items * size, element, cursor->scratch, items * size, count, items * size);
        }
    }
    for (i64 column = 0; column < columns && (pieces || !tokens); column++) cursor->parts[column].row++;
}

static int columns_check(Check *check, i64 index, const Array *lengths, i64 rows, i64 total) {
    const Entry *entry = check->table->entries + index, *own = check->table->entries + entry->first;
    if (entry->a.count || entry->b.count || entry->c.count || !entry->items || entry->items % entry->number) return 0;
    for (i64 column = 0; column < entry->number; column++, own++)
        if (own->layout != entry->layout || own->size != entry->size || own->items != entry->items / entry->number || !is_leaf(own)) return 0;
    return 1;
}

static int columns_is_odd(Check *check, i64 index, const Array *lengths, i64 rows) {
    const Entry *entry = check->table->entries + index;
    for (i64 column = 0; column < entry->number; column++)
        if (entry_is_odd(check, entry->first + column, NULL, rows)) return 1;
    return 0;
}

static const Encoding COLUMNS_ENCODING = {
    .arrays = "", .once = "", .is_signed = "", .encode = columns_encode, .open = columns_open, .decode = columns_decode,
    .check = columns_check, .is_odd = columns_is_odd,
};
