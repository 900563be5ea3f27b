/* Encoding on a device: where its kernels write.

   A unit is a field, or one of its columns, in a form that was chosen before. A kernel says what the form of each row of each
   unit takes; here is where the arrays go. Small arrays, of a few numbers a row, are written here, and the kernel writes the
   others. (packed/cuda/encode.py) */

struct Placing {
    Unit *units;
    const Stat *stats;
    Spot *spots;
    const i64 *const *bounds;
    i64 rows, used;
    u8 *memory;
    i64 memory_used;
    Small *small;
    i64 num_small;
    Entry *entries;
    i64 num_entries;
    i64 *numbers, *index, *firsts, *slots;
};

/* A unit that is placed, in `n` rows, `index` or all. `sums` are the numbers of arrays a, b and c; `each` is to be the bytes
   of one that the kernel writes, 0 if it writes none, `way` what becomes of the rows. The others say of all rows what Stat
   says of one; `real` is the first row with words, -1 for none. */
struct Placed {
    Unit *unit;
    const Stat *stats;
    const i64 *index;
    i64 number, n, sums[3], each[3], way, real, low, high, least, most;
};

static i64 unit_words(const Placing *placing, i64 unit, i64 row) {
    const Unit *own = placing->units + unit;
    const i64 *bounds = own->bounds < 0 ? NULL : placing->bounds[own->bounds];
    return bounds ? (bounds[row + 1] - bounds[row]) * own->items : row < own->rows ? own->items : 0;
}

static void place_array(Placing *placing, Array *array, i64 size, i64 count) {
    i64 at = (placing->used + 7) & ~(i64)7;
    *array = (Array){at, size, count};
    placing->used = at + size * count;
}

/* Notes an array that is written here; its memory. */
static u8 *place_small(Placing *placing, Array *array, i64 size, i64 count) {
    place_array(placing, array, size, count);
    u8 *to = placing->memory + placing->memory_used;
    placing->small[placing->num_small++] = (Small){array->at, placing->memory_used, size * count};
    placing->memory_used += size * count;
    return to;
}

/* `put_list` of `placing->numbers`. */
static void place_numbers(Placing *placing, Array *array, i64 count, int is_signed) {
    const i64 *numbers = placing->numbers;
    i64 low = count ? numbers[0] : 0, high = low;
    for (i64 i = 0; i < count; i++) {
        low = numbers[i] < low ? numbers[i] : low;
        high = numbers[i] > high ? numbers[i] : high;
    }
    if (count > 1 && low == high) count = 1;
    i64 size = bytes_between(low, high, is_signed);
    u8 *to = place_small(placing, array, size, count);
    for (i64 i = 0; i < count; i++) put_word(to + i * size, numbers[i], size);
}

/* A number of Stat for each row: how many words or stretches it has. */
static void place_counts(Placing *placing, const Placed *placed, Array *array) {
    for (i64 i = 0; i < placed->n; i++) placing->numbers[i] = placed->stats[placed->index ? placed->index[i] : i].total;
    place_numbers(placing, array, placed->n, 0);
}

/* Places `total` numbers between two of them, equal ones once; the bytes of one if the kernel writes them, else 0. */
static i64 place_between(Placing *placing, Array *array, i64 total, i64 low, i64 high, int is_signed) {
    i64 size = bytes_between(low, high, is_signed);
    if (total > 1 && low != high) {
        place_array(placing, array, size, total);
        return size;
    }
    placing->numbers[0] = low;
    place_numbers(placing, array, total > 0, is_signed);
    return 0;
}
