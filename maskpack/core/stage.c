/* What the decode kernel reads beside the body.

   Tables of int64, one behind the other, that axes and sources name by their first number, -1 for none.
   (packed/cuda/job_table.py describes them) */

/* Where the kernel finds the words of an entry; false without memory. */
static int add_source(Stage *stage, i64 index, const Extent *extent, Source *source) {
    const Entry *entry = stage->entries + index;
    *source = (Source){BY_PLACE, -1, -1, 1, entry->a.at, entry->a.size, -1, entry->number, 0, -1, -1, -1, -1, -1, -1, -1, -1};
    return ENCODINGS[entry->kind]->stage(stage, entry, extent, source);
}

/* Writes tables behind the first `used` numbers: the bounds of all layouts, their spans if `padded`, those of the wanted
   entries, and the words of pads, of `pad_sizes` bytes. `axes` [m + 1]: of the layouts, and of rows without one; `pad_places`
   [num_pads]. Returns the numbers in use, of which only `room` are written; -1 without memory. */
API i64 maskpack_stage(const Entry *entries, const Layout *layouts, i64 m, const u8 *body, i64 rows, i64 dense_rows, i64 padded,
                       const i64 *wanted, i64 num_wanted, const Array *pads, const i64 *pad_sizes, i64 num_pads,
                       i64 *tables, i64 used, i64 room,
                       Axis *axes, Source *sources, i64 *pad_places) {
    Stage stage = {entries, body, tables, used, room, wanted, sources, 0};
    for (i64 at = 0; at <= m; at++) axes[at] = (Axis){dense_rows, 1, -1, -1, -1, -1};
    for (i64 at = 0; at < m; at++) {
        const i64 *bounds = layouts[at].bounds;
        axes[at] = (Axis){bounds[rows], 0, stage.used, -1, -1, -1};
        add(&stage, 0);
        for (i64 row = 0; row < rows; row++) {
            i64 length = bounds[row + 1] - bounds[row];
            axes[at].longest = length > axes[at].longest ? length : axes[at].longest;
            add(&stage, bounds[row + 1]);
        }
    }
    for (i64 at = 0; at < m && padded; at++) {
        const Layout *layout = layouts + at;
        i64 spans = layout->splits[rows], tokens = 0;
        axes[at].splits = stage.used;
        for (i64 row = 0; row <= rows; row++) add(&stage, layout->splits[row]);
        axes[at].starts = stage.used;
        for (i64 span = 0; span < spans; span++) add(&stage, layout->starts[span]);
        axes[at].ends = stage.used;
        add(&stage, 0);
        for (i64 span = 0; span < spans; span++) add(&stage, tokens += layout->counts[span]);
    }
    for (; stage.num_sources < num_wanted; stage.num_sources++) {
        i64 index = wanted[stage.num_sources];
        const Entry *entry = entries + index;
        Extent extent = {dense_rows, NULL, -1, entry->items};
        if (entry->layout >= 0) {
            extent.rows = rows;
            extent.bounds = layouts[entry->layout].bounds;
            extent.table = axes[entry->layout].bounds;
        }
        if (!add_source(&stage, index, &extent, sources + stage.num_sources)) return -1;
    }
    for (i64 at = 0; at < num_pads; at++) {
        i64 size = pad_sizes[at] < 8 ? pad_sizes[at] : 8, words = pad_sizes[at] / size;
        pad_places[at] = stage.used;
        for (i64 row = 0; row < pads[at].count; row++)
            for (i64 word = 0; word < words; word++)
                add(&stage, (i64)word_at(body + pads[at].at + row * pads[at].size + 1 + word * size, size));
    }
    return stage.used;
}
