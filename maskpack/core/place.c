/* Encoding on a device: the fields. (place.h) */

/* What the arrays of a unit have in all rows; writes to the spots what they have before each. */
static void sum_rows(Placing *placing, Placed *placed) {
    const Unit *unit = placed->unit;
    i64 *sums = placed->sums;
    for (i64 i = 0; i < placed->n; i++) {
        i64 row = placed->index ? placed->index[i] : i, words = unit_words(placing, placed->number, row);
        const Stat *stat = placed->stats + row;
        Spot *spot = placing->spots + placed->number * placing->rows + row;
        if (unit->kind == BLOCKS) words = (words + BLOCK - 1) / BLOCK;
        spot->at[0] = sums[0];
        spot->at[1] = unit->kind == BLOCKS ? sums[0] : sums[1];
        spot->at[2] = sums[2];
        sums[0] += words;
        sums[1] += stat->total > 1 ? stat->total - 1 : 0;
        sums[2] += stat->total;
        if (!words) continue;
        placed->low = placed->real < 0 || stat->low < placed->low ? stat->low : placed->low;
        placed->high = placed->real < 0 || stat->high > placed->high ? stat->high : placed->high;
        placed->least = stat->least < placed->least ? stat->least : placed->least;
        placed->most = stat->most > placed->most ? stat->most : placed->most;
        if (placed->real < 0) placed->real = row;
    }
}

/* Places the arrays of a unit in `n` rows, `index` or all. */
static void place_unit(Placing *placing, i64 number, const i64 *index, i64 n, Entry *entry) {
    Unit *unit = placing->units + number;
    Spot *spots = placing->spots + number * placing->rows;
    Placed placed = {unit, placing->stats + number * placing->rows, index, number, n, {0, 0, 0}, {0, 0, 0}, WRITTEN, -1, 0, 0, INT64_MAX, 0};
    sum_rows(placing, &placed);
    *entry = entry_of(unit->kind, entry->layout, unit->items, unit->size);
    entry->number = unit->number;
    ENCODINGS[unit->kind]->place(placing, &placed, entry);
    unit->b_size = placed.each[1];
    unit->c_size = placed.each[2];
    const Array *arrays[3] = {&entry->a, &entry->b, &entry->c};
    for (i64 i = 0; i < n; i++) {
        Spot *spot = spots + (index ? index[i] : i);
        for (int k = 0; k < 3; k++) spot->at[k] = arrays[k]->at + spot->at[k] * placed.each[k];
        spot->way = placed.way;
    }
}

/* The first of each of the rows that differ, to `firsts`, and of each row its number among them, to `index`, as far as
   hashes say; how many there are. `slots` has room for four times the rows. */
static i64 find_alike(Placing *placing, i64 unit) {
    const Stat *stats = placing->stats + unit * placing->rows;
    i64 room = 16, found = 0;
    while (room < 2 * placing->rows) room *= 2;
    memset(placing->slots, 0, (size_t)room * sizeof(i64));
    for (i64 row = 0; row < placing->rows; row++) {
        u64 slot = (u64)stats[row].hash * 0x9E3779B97F4A7C15ull >> 20;
        i64 words = unit_words(placing, unit, row);
        for (;; slot++) {
            i64 *here = placing->slots + (slot & (u64)(room - 1));
            if (!*here) {
                *here = found + 1;
                placing->firsts[found++] = row;
            }
            i64 other = placing->firsts[*here - 1];
            if (stats[other].hash == stats[row].hash && unit_words(placing, unit, other) == words) {
                placing->index[row] = *here - 1;
                break;
            }
        }
    }
    return found;
}

/* An earlier field of one unit with the same words and form, as far as hashes say; -1 if there is none. */
static i64 same_before(const Placing *placing, const Settled *fields, i64 at) {
    const Settled *field = fields + at;
    const Unit *own = placing->units + field->first;
    if (field->kind == DICTIONARY || field->kind == COLUMNS || own->near >= 0 || field->layout < 0) return -1;
    for (i64 before = 0; before < at; before++) {
        const Settled *other = fields + before;
        const Unit *theirs = placing->units + other->first;
        if (other->entry < 0 || other->kind != field->kind || other->layout != field->layout || theirs->near >= 0) continue;
        if (theirs->items != own->items || theirs->size != own->size || theirs->number != own->number) continue;
        i64 row = 0;
        const Stat *one = placing->stats + field->first * placing->rows, *two = placing->stats + other->first * placing->rows;
        while (row < placing->rows && one[row].hash == two[row].hash) row++;
        if (row == placing->rows) return before;
    }
    return -1;
}

/* The words of a field; -1 if some do not fit its form, or are not its pad under the mask. */
static i64 count_fitting(const Placing *placing, const Settled *field) {
    i64 total = 0, rows = placing->rows;
    for (i64 unit = field->first; unit < field->first + field->units; unit++)
        for (i64 row = 0; row < rows; row++) {
            i64 words = unit_words(placing, unit, row);
            i64 flags = row < placing->units[unit].rows ? placing->stats[unit * rows + row].flags : 0;
            if (flags & IS_STRAY || (words && flags & IS_MISFIT)) return -1;
            total += words;
        }
    return total;
}

/* Adds the entry of a field itself. */
static int add_entry(Placing *placing, Settled *field, Entry entry) {
    field->entry = placing->num_entries;
    placing->entries[placing->num_entries++] = entry;
    return 1;
}

/* Adds the entries of the units of a field, `stored` rows of the one of a dictionary; their bytes, -1 if what they are near
   to has no entry. */
static i64 place_units(Placing *placing, const Settled *fields, const Settled *field, i64 stored) {
    i64 nbytes = 0, rows = placing->rows;
    for (i64 unit = field->first; unit < field->first + field->units; unit++) {
        Entry *entry = placing->entries + placing->num_entries++;
        entry->layout = field->layout;
        if (field->kind == DICTIONARY) place_unit(placing, unit, placing->firsts, stored, entry);
        else place_unit(placing, unit, NULL, placing->units[unit].rows, entry);
        i64 used = 0;
        for (i64 row = 0; row < rows; row++) used |= placing->stats[unit * rows + row].flags & NEAR_USED;
        if (used && fields[field->near].entry < 0) return -1;
        if (used) entry->second = fields[field->near].entry;
        nbytes += bytes_of(entry);
    }
    return nbytes;
}

/* Finds the rows of a dictionary that differ, how many; the others are to equal them. */
static i64 place_repeated(Placing *placing, const Settled *field) {
    i64 stored = find_alike(placing, field->first), first = field->first * placing->rows;
    for (i64 row = 0; row < placing->rows; row++) placing->spots[first + row].way = first + placing->firsts[placing->index[row]];
    return stored;
}

/* Places a field; false if it does not fit its form. */
static int place_field(Placing *placing, Settled *fields, i64 at) {
    Settled *field = fields + at;
    i64 total = count_fitting(placing, field), rows = placing->rows, stored = rows, made = placing->num_entries;
    Entry whole = entry_of(field->kind, field->layout, field->items, field->size);
    if (total < 0) return 0;
    if (!total) {
        whole.kind = PLAIN;
        place_array(placing, &whole.a, field->size, 0);
        return add_entry(placing, field, whole);
    }
    if (field->kind == CONCAT) {
        whole.first = fields[field->head].entry;
        whole.second = fields[field->tail].entry;
        return whole.first >= 0 && whole.second >= 0 && add_entry(placing, field, whole);
    }
    i64 before = same_before(placing, fields, at);
    if (before >= 0) {
        i64 unit = field->first, other = fields[before].first;
        for (i64 row = 0; row < rows; row++) placing->spots[unit * rows + row].way = other * rows + row;
        field->entry = fields[before].entry;
        return 1;
    }
    if (field->kind == DICTIONARY && (stored = place_repeated(placing, field)) == rows) return 0;
    i64 nbytes = place_units(placing, fields, field, stored);
    if (nbytes < 0) return 0;
    if (field->kind == DICTIONARY) {
        memcpy(placing->numbers, placing->index, sizeof(i64) * (size_t)rows);
        place_numbers(placing, &whole.a, rows, 0);
        for (i64 i = 0; i < stored; i++)
            placing->numbers[i] = unit_words(placing, field->first, placing->firsts[i]) / field->items;
        place_numbers(placing, &whole.b, stored, 0);
        nbytes += bytes_of(&whole);
    } else whole.number = field->units;
    whole.first = made;
    if (field->kind == DICTIONARY || field->kind == COLUMNS) add_entry(placing, field, whole);
    field->entry = placing->num_entries - 1;
    Form form = {0};
    form.cost = field->cost;
    return !is_larger(nbytes, &form, total);
}

/* Places the arrays of fields behind the first `used` bytes of a body, whose size it returns, or -1 without memory.
   `bounds` are those of the layouts. `entries` has room for two a field and one a unit, `small` for three a unit and two a
   field, `memory` for 24 bytes of each row of each of these. `made` are the numbers of entries and of small arrays. */
API i64 maskpack_place(Unit *units, i64 num_units, Settled *fields, i64 num_fields, const Stat *stats, i64 rows,
                       const i64 *const *bounds, i64 used, Spot *spots, Entry *entries, Small *small, u8 *memory, i64 *made) {
    i64 *scratch = malloc(sizeof(i64) * (size_t)(7 * rows + 64));
    if (!scratch) return -1;
    Placing placing = {units, stats, spots, bounds, rows, used, memory, 0, small, 0, entries, 0,
                       scratch, scratch + rows + 1, scratch + 2 * rows + 2, scratch + 3 * rows + 3};
    for (i64 spot = 0; spot < num_units * rows; spot++) spots[spot] = (Spot){{0, 0, 0}, LEFT_OUT};
    for (i64 at = 0; at < num_fields; at++) {
        Placing before = placing;
        fields[at].entry = -1;
        if (place_field(&placing, fields, at)) continue;
        placing.used = before.used;
        placing.memory_used = before.memory_used;
        placing.num_small = before.num_small;
        placing.num_entries = before.num_entries;
        fields[at].entry = -1;
        for (i64 spot = fields[at].first * rows; spot < (fields[at].first + fields[at].units) * rows; spot++)
            spots[spot].way = LEFT_OUT;
    }
    free(scratch);
    made[0] = placing.num_entries;
    made[1] = placing.num_small;
    return placing.used;
}
