/* A batch to a table and a body: jobs, one a field. */

static const Form NO_FORM = {.kind = -1, .inner_kind = -1};
enum { NO_GAIN = -2 }; /* as `inner_kind`: rows look alike or have copies, but a dictionary or pieces take no fewer bytes */
/* Another form is looked for in one of some batches: of FEW_BYTES, and of SMALL_BYTES whose form did for NEW_BATCHES; of more
   bytes in each. */
enum { FEW_BYTES = 4096, SMALL_BYTES = 1 << 15, NEW_BATCHES = 16, SOME_BATCHES = 8 };
enum { SEEN_WORDS = 1 << 15 };               /* most words that copies are looked for in, to tell whether there are any */

/* A job that is encoded to `out`, but for arrays whose numbers `slices` have; `memory` is that of `out`, or NULL if it is the
   body. */
typedef struct {
    Job given; /* as it was before */
    Out out;
    u8 *memory;
    Slices slices;
    int stays_padded;
} Encoded;

typedef struct {
    Job *jobs;
    const Layout *layouts;
    Entry *slots;
    Encoded *encoded; /* of each job */
    Crew *crew;
    i64 slice_bytes;
} Work;

/* Opens the rows of a job; `field` is a copy with the pad to verify. False without memory. */
static int open_rows(Rows *rows, const Job *job, const Layout *layouts, Field *field) {
    const Layout *layout = job->layout < 0 ? NULL : layouts + job->layout;
    const u8 *values = job->field.packed ? job->field.packed : (const u8 *)&ZEROS; /* no words are no NULL, which says STRAY */
    *rows = (Rows){job->rows, job->size, job->items, layout ? layout->bounds : NULL, NULL, values, NULL, NULL, NULL, NULL, 0};
    if (!job->padded) return 1;
    *field = job->field;
    field->mode = NO_PAD;
    rows->field = field;
    rows->layout = layout;
    return rows_open(rows);
}

/* Whether rows that take `bytes` in one entry may take fewer as pieces: in a part of their words there are copies. */
static int may_copy(const Rows *rows, const Job *job, i64 bytes, i64 part) {
    i64 total = total_words(rows), most = total / part < SEEN_WORDS ? total / part : SEEN_WORDS;
    if (job->by_kernels || job->integers != INTEGERS || (rows->size != 4 && rows->size != 8) || (rows->items > 1 && job->layout >= 0)) return 0;
    return 8 * bytes > total * rows->size && bytes >= FEW_BYTES / 4 && has_copies(rows, most > FEW_BYTES ? most : FEW_BYTES);
}

/* Whether rows that take `bytes` of `total` words in another form clearly take fewer as SPARSE, as far as a sample can tell. */
static int may_be_sparse(const Rows *rows, const Job *job, i64 bytes, i64 total) {
    if (job->by_kernels) return 0;
    u8 words[8 * GLANCE_WORDS];
    i64 bounds[SAMPLE_ROWS + 1];
    Rows sample = sample_of(rows, GLANCE_WORDS, FEW_WORDS, words, bounds);
    Search search;
    int fits = divide(&search, &sample, NULL) == FITS;
    i64 most = search.used * rows->size + 4 * search.copies.count, fixed = rows->rows + 2 * (i64)sizeof(Entry), sampled = total_words(&sample);
    search_close(&search);
    return fits && 10 * (most * total + fixed * sampled) < 9 * bytes * sampled;
}

/* Encodes packed values anew: columns, a dictionary, pieces, SPARSE or one entry, whichever takes fewest bytes. */
static int encode_anew(const Rows *rows, const Rows *near, const Job *job, Out *out, Entry *slots, i64 *count, Form *form) {
    i64 start = out->used, total = total_words(rows), plain = total * rows->size, layout = slots->layout;
    *count = 1;
    int done = choose(rows, near, job->hints, (int)job->integers, out, slots, form);
    if (done != FITS) return done;
    i64 best = bytes_of(slots), room = plain + 8 * rows->rows + 4096;
    int columns = job->columns > 1 && total, repeats = job->hints >> DICTIONARY & 1 || (8 * best > plain && look_alike(rows, NULL));
    int copies = !job->by_kernels && job->integers == INTEGERS && (job->hints >> PIECES & 1 || may_copy(rows, job, best, 4));
    static const i64 KIND_OF[] = {COLUMNS, DICTIONARY, PIECES, SPARSE, SPARSE}; /* the last, if it fits, with `near` */
    int ways[] = {columns, repeats, copies, !job->by_kernels, 0}, integers = (int)job->integers;
    Entry *tried = calloc((size_t)(job->columns > 1 ? job->columns : 1) + 2, sizeof(Entry));
    int many = job->columns > FEW_COLUMNS;
    u8 *memory = malloc((size_t)room * (size_t)(columns && !many ? job->columns : 1));
    if (!tried || !memory) done = NO_MEMORY;
    for (int way = 0; way < 5 && done == FITS; way++) {
        if (!ways[way]) continue;
        Out spare = {memory, out->base + ((start + 7) & ~(i64)7), 0, way || many ? room : room * job->columns, 0};
        i64 bytes = 0, entries = way ? 2 : job->columns + 1, limit = best;
        Form found = {COLUMNS, 0, -1, 0, 0, 0};
        int fits;
        tried[0] = tried[1] = entry_of(PLAIN, layout, rows->items, rows->size);
        if (way) fits = ENCODINGS[KIND_OF[way]]->encode_stored(rows, way == 4 ? near : NULL, job->hints, integers, &spare, tried, &found, 0);
        else if (many) fits = encode_as(COLUMNS, job->columns, rows, NULL, &spare, tried);
        else fits = columns_choose(rows, job->columns, integers, &spare, tried);
        /* some more bytes pay: many columns are taken without the others, and a codec makes fewer bytes of them */
        if (!way && many) limit = best + best / 32 - (i64)sizeof(Entry) * entries;
        /* fewer bytes pay less: kernels do not read pieces, and do not write SPARSE */
        if (way >= 2 && form->kind != SPARSE && !(job->hints >> KIND_OF[way] & 1)) limit = best - best / 16 - (i64)sizeof(Entry);
        for (i64 i = 0; i < entries; i++) bytes += bytes_of(tried + i);
        if (fits == NO_MEMORY) done = fits;
        if (way == 3) ways[4] = near && fits == FITS;
        if (fits != FITS || bytes >= limit || adopt(out, start, &spare) != FITS) continue;
        memcpy(slots, tried, sizeof(Entry) * (size_t)entries);
        best = bytes;
        *count = entries;
        *form = found;
    }
    if ((repeats || copies) && form->inner_kind < 0) form->inner_kind = NO_GAIN;
    form->cost = total ? best * COST_WORDS / total : 0;
    free(tried);
    free(memory);
    return done;
}

/* A field that is encoded, to the `count` entries from `slots` on. */
typedef struct {
    const Work *work;
    Job *job;
    const Rows *rows, *near; /* NULL for none */
    Out *out;
    Entry *slots;
    Slices *slices;
    i64 *count, total;
} Task;

/* Whether another form is to be looked for in this batch, for a field of so many bytes. */
static int looks_for_another(Form *form, i64 bytes) {
    int few = bytes < FEW_BYTES && form->kind != PLAIN, fresh = form->age < NEW_BATCHES;
    return ++form->age % SOME_BATCHES == 0 || bytes >= SMALL_BYTES || (fresh && !few);
}

/* Whether another form may be smaller than the entries in the form of the last time. `rows` were verified; `ends` are those of
   each, NULL if they are not known. */
static int may_shrink(const Task *task, const Rows *rows, const u64 *ends) {
    const Job *job = task->job;
    Form *form = &task->job->form;
    const Rows *near = form->kind == COLUMNS ? NULL : task->near;
    i64 bytes = 0, total = task->total, plain = total * rows->size;
    for (i64 i = 0; i < *task->count; i++) bytes += bytes_of(task->slots + i);
    int looks = looks_for_another(form, plain), due = form->age % SOME_BATCHES == 0;
    if (is_larger(bytes, form, total) || 2 * bytes * COST_WORDS < form->cost * total) return 1; /* of another kind of data */
    if (!looks) return 0;
    int tries = form->inner_kind != NO_GAIN && !ENCODINGS[form->kind]->encode_stored;
    if (tries && 8 * bytes > plain && look_alike(rows, ends)) return 1;
    if (tries && due && may_copy(rows, job, bytes, 16)) return 1;
    if (form->kind != SPARSE && may_be_sparse(rows, job, bytes, total)) return 1;
    return is_better(rows, near, (int)job->integers, form, bytes, total);
}

/* Encodes rows to slices in a form, with those of other fields. */
static int encode_sliced(const Task *task, const Rows *rows, const Rows *others, i64 num_others, i64 kind, i64 number) {
    *task->count = kind == COLUMNS ? number + 1 : 1;
    *task->slices = (Slices){rows, others, num_others, kind, number, *task->count, 0, NULL, NULL, NULL};
    return encode_slices(task->slices, task->work->crew, task->work->slice_bytes, task->out, task->slots);
}

/* Encodes in the form of the last time, of one entry or of many columns; MISFIT if another may be smaller. */
static int encode_again(const Task *task) {
    const Form *form = &task->job->form;
    Rows rows = *task->rows;
    Field unverified;
    int many = form->kind == COLUMNS && task->job->columns > FEW_COLUMNS;
    if (!many && !is_single(form->kind)) return MISFIT;
    u64 *ends = rows.ends = form->inner_kind == NO_GAIN || !rows.field ? NULL : calloc((size_t)rows.rows + 1, sizeof(u64));
    int done = encode_sliced(task, &rows, task->near, task->near != NULL, form->kind, many ? task->job->columns : form->number);
    rows = rows_verified(&rows, &unverified);
    if (done == FITS && may_shrink(task, &rows, ends)) done = MISFIT;
    free(ends);
    return done;
}

/* Encodes from packed values: rows that are stored as the last time, or whichever form is best. */
static int encode_packed(const Task *task) {
    Job *job = task->job;
    Form *form = &job->form;
    Rows flat = *task->rows;
    i64 room = task->total * flat.size, *bounds = NULL;
    Out values = {NULL, 0, 0, room, 0};
    Entry unused;
    int done = FITS;
    if (flat.field) {
        bounds = calloc((size_t)flat.rows + 1, sizeof(i64));
        values.memory = malloc((size_t)room + 8);
        done = bounds && values.memory ? plain_encode(&flat, NULL, &values, &unused) : NO_MEMORY;
        for (i64 row = 0; row < flat.rows && bounds; row++) bounds[row + 1] = bounds[row] + row_length(&flat, row) / flat.items;
        flat = (Rows){flat.rows, flat.size, flat.items, bounds, NULL, values.memory, NULL, NULL, NULL, NULL, 0};
    }
    if (done == FITS && has_kind(form->kind) && ENCODINGS[form->kind]->encode_stored) {
        done = ENCODINGS[form->kind]->encode_stored(&flat, task->near, job->hints, (int)job->integers, task->out, task->slots, form, 1);
        *task->count = 2;
        if (done == FITS && may_shrink(task, &flat, NULL)) done = MISFIT;
        if (done != FITS) task->out->used = 0;
    } else if (done == FITS) done = MISFIT;
    if (done == MISFIT || done == FULL) {
        *task->slots = entry_of(PLAIN, job->layout, job->items, job->size);
        done = encode_anew(&flat, task->near, job, task->out, task->slots, task->count, form);
    }
    free(bounds);
    free(values.memory);
    return done;
}

/* Whether a job may refer to another one: one before it that did not stay padded. */
static int may_refer(const Work *work, i64 at, i64 other) { return other >= 0 && other < at && !work->encoded[other].stays_padded; }

/* Encodes the rows of a job: as those of two others together, in the form of the last time, or in the one that is best. */
static int encode_field(const Work *work, i64 at, const Rows *rows) {
    Job *job = work->jobs + at;
    Out *out = &work->encoded[at].out;
    Entry *slots = work->slots + job->first, plain = entry_of(PLAIN, job->layout, job->items, job->size);
    Task task = {work, job, rows, NULL, out, slots, &work->encoded[at].slices, &job->count, total_words(rows)};
    i64 others[] = {job->head, job->tail, job->near};
    Rows beside[3] = {0};
    Field fields[3];
    int done = MISFIT, refers[3], opened = 1;
    *slots = plain;
    job->count = 1;
    if (!task.total) return encode_as(PLAIN, 0, rows, NULL, out, slots); /* the pads are verified all the same */
    for (int i = 0; i < 3 && opened; i++)
        if ((refers[i] = may_refer(work, at, others[i]))) opened = open_rows(beside + i, work->jobs + others[i], work->layouts, fields + i);
    if (!opened) done = NO_MEMORY;
    else if (refers[0] && refers[1]) done = encode_sliced(&task, rows, beside, 2, CONCAT, 0);
    if (done == MISFIT) {
        *slots = plain;
        task.near = refers[2] ? beside + 2 : NULL;
        done = encode_again(&task);
        if (done == MISFIT || done == FULL) {
            free_slices(task.slices);
            out->used = 0;
            *slots = plain;
            done = encode_packed(&task);
        }
    }
    for (int i = 0; i < 3; i++) free(beside[i].scratch);
    return done;
}

/* Whether rows of bools have a byte other than 0 and 1. */
static int have_odd(const Rows *rows) {
    for (i64 row = 0; row < rows->rows; row++)
        if (are_odd(row_words(rows, row), row_length(rows, row))) return 1;
    return 0;
}

/* Stores `count` records behind the entries of a job with rows; equal ones once, and then without signs if all their bytes
   but the first `least` are 0. */
static int store_pads(Job *job, const u8 *pads, i64 size, i64 count, i64 least, Out *out) {
    i64 equal = 1;
    if (!job->rows) return FITS;
    for (i64 row = 1; row < count && equal; row++) equal = !memcmp(pads, pads + row * size, (size_t)size);
    count = equal ? 1 : count;
    i64 kept = equal && equal_bytes(pads + least, size - least, ZEROS) == size - least ? least : size;
    u8 *to = reserve(out, &job->under_mask, kept, count);
    if (!to) return FULL;
    memcpy(to, pads, (size_t)(kept * count));
    for (i64 row = 0; row < count && job->integers == BOOLS; row++)
        if (pads[row * size + 1] > 1) return ODD;
    return FITS;
}

/* Whether no pad of a job is under its mask. */
static int is_stray(const Job *job, const Rows *rows, Field *field) {
    for (i64 pad = 0; pad < job->num_pads; pad++) {
        i64 row = 0;
        try_pad(field, job->pads + pad, rows->layout);
        while (row < job->rows && row_words(rows, row)) row++;
        if (row == job->rows) return 0;
    }
    return 1;
}

/* Encodes a job with the first of its pads that is under its mask. */
static void encode_job(void *context, i64 at) {
    Work *work = context;
    Job *job = work->jobs + at;
    Field field;
    Rows rows = {0};
    i64 width = job->padded ? work->layouts[job->layout].width : 0;
    u8 *pads = malloc((size_t)((width / 8 + 18) * (job->rows + 1)));
    Out *out = &work->encoded[at].out;
    int done = pads && out->memory && open_rows(&rows, job, work->layouts, &field) ? STRAY : NO_MEMORY;
    job->under_mask = (Array){0, 1, 0};
    field.pads = pads;
    if (done == STRAY && job->keeps == DID && job->padded && !is_stray(job, &rows, &field)) {
        job->keeps = MAY;
        job->form = NO_FORM;
    }
    for (job->pad = 0; done == STRAY && job->keeps != DID && job->pad < (job->padded ? job->num_pads : 1); job->pad++) {
        out->used = 0;
        if (job->padded) try_pad(&field, job->pads + job->pad, rows.layout);
        done = encode_field(work, at, &rows);
    }
    job->pad--;
    if (done == FITS && job->given_count) done = store_pads(job, job->given, job->given_size, job->given_count, job->given_size, out);
    if (done == FITS && job->padded) {
        i64 by_rows = (field.mode & ~TRUSTED) >= BY_ROW && job->rows;
        if (!by_rows) {
            pads[0] = (field.mode & ~TRUSTED) == BY_EDGE ? EDGE : WORD;
            memcpy(pads + 1, field.pad, (size_t)field.size);
        }
        done = store_pads(job, pads, by_rows ? field.pads_size : 1 + field.size, by_rows ? job->rows : 1, 1 + field.size, out);
    }
    if (done == FITS && job->integers == BOOLS) {
        field.mode = NO_PAD;
        if (have_odd(&rows)) done = ODD;
    }
    free(rows.scratch);
    free(pads);
    job->result = done;
}

/* Encodes a field that stays padded: rows of one element, all its words. It refers to no other. */
static int encode_kept(Work *work, i64 at) {
    Job *job = work->jobs + at, given = *job;
    job->padded = job->keeps = job->hints = job->columns = 0;
    job->layout = job->near = job->head = job->tail = -1;
    job->items *= work->layouts[given.layout].width;
    job->field.packed = given.field.padded;
    if (given.keeps != DID) job->form = NO_FORM;
    encode_job(work, at);
    given.form = job->form;
    given.count = job->count;
    given.pad = 0;
    given.keeps = DID;
    given.result = job->result == FITS ? KEPT : job->result;
    int done = (int)job->result;
    *job = given;
    return done;
}

static int same_bytes(const u8 *body, const Array *one, const Array *other) {
    return one->size == other->size && one->count == other->count &&
           !memcmp(body + one->at, body + other->at, (size_t)(one->size * one->count));
}

/* Whether two entries hold equal words in equal arrays. */
static int same_entry(const u8 *body, const Entry *one, const Entry *other) {
    return one->kind == other->kind && one->layout == other->layout && one->layout >= 0 && one->items == other->items &&
           one->size == other->size && one->number == other->number && one->first == other->first &&
           one->second == other->second && same_bytes(body, &one->a, &other->a) && same_bytes(body, &one->b, &other->b) &&
           same_bytes(body, &one->c, &other->c);
}

/* Whether the `count` entries of a field, of which the last is its own, hold what entry `other` holds. */
static int same_field(const u8 *body, const Entry *slots, i64 count, const Entry *entries, i64 other) {
    Entry own = slots[count - 1];
    const Entry *theirs = entries + other;
    if (count > 1 && own.kind == theirs->kind) own.first = theirs->first;
    if (!same_entry(body, &own, theirs)) return 0;
    for (i64 part = 0; part < count - 1; part++)
        if (!same_entry(body, slots + part, entries + theirs->first + part)) return 0;
    return 1;
}

/* The entry that a made one refers to, from a number of it: one of its job's own, which go behind `before` others, or of
   another field. */
static i64 settled_number(i64 number, const Job *job, i64 before, const i64 *fields) {
    if (number >= -1) return number < 0 ? number : before + number;
    return fields[number == OF_JOB_NEAR ? job->near : number == OF_JOB_HEAD ? job->head : job->tail];
}

/* The packed batch that is made: the table of entries, and a body of `room` bytes. `slots` and `entries` have room for all
   entries of all jobs, those of a job from its `first` on in `slots`; `fields` [n] are the entries of the fields. */
typedef struct {
    Entry *slots, *entries;
    i64 *num_entries, *fields;
    u8 *body;
    i64 room;
} Packed;

/* Writes the arrays of a job to a body, where they begin at `begin`; its entries say where they are. What is between arrays
   is 0. */
static void write_arrays(const Work *work, i64 at, u8 *body, i64 begin) {
    const Job *job = work->jobs + at;
    Encoded *own = work->encoded + at;
    Entry *entries = work->slots + job->first;
    const Array *pads = &job->under_mask;
    if (!own->slices.count) {
        memmove(body + begin, own->out.memory, (size_t)own->out.used);
        return;
    }
    for (i64 i = 0; i < own->slices.num_entries; i++)
        for (const Array *array = &entries[i].a; array <= &entries[i].c; array++) {
            i64 end = array->at + array->size * array->count, stop = (end + 7) & ~(i64)7;
            if (array->count && stop <= begin + own->out.used) memset(body + end, 0, (size_t)(stop - end));
        }
    own->slices.entries = entries;
    own->slices.body = body;
    share(work->crew, write_slice, &own->slices, own->slices.count);
    if (pads->count) memcpy(body + pads->at, own->out.memory + (pads->at - begin), (size_t)(pads->size * pads->count));
}

/* Moves the entries of a job to the end of the table, and their arrays behind the others. A field that equals an earlier
   one takes its entry, unless that holds the stored rows of the entry behind it. `used` bytes of the body are in use. FITS,
   or FULL. */
static int settle(Work *work, i64 at, const Packed *to, i64 *used) {
    Job *job = work->jobs + at;
    const Out *out = &work->encoded[at].out;
    Entry *slots = work->slots + job->first;
    i64 begin = (*used + 7) & ~(i64)7, moved = begin - out->base, number = -1;
    if (begin + out->used > to->room) return FULL;
    for (i64 i = 0; i < job->count; i++) {
        Entry *entry = slots + i;
        for (Array *array = &entry->a; array <= &entry->c; array++) array->at = array->count ? array->at + moved : 0;
        entry->first = settled_number(entry->first, job, *to->num_entries, to->fields);
        entry->second = settled_number(entry->second, job, *to->num_entries, to->fields);
    }
    if (job->under_mask.count) job->under_mask.at += moved;
    memset(to->body + *used, 0, (size_t)(begin - *used));
    write_arrays(work, at, to->body, begin);
    for (i64 other = 0; other < *to->num_entries && number < 0; other++) {
        int inside = other + 1 < *to->num_entries && REFERENCES[to->entries[other + 1].kind][0] == OF_ROWS;
        if (!inside && same_field(to->body, slots, job->count, to->entries, other)) number = other;
    }
    i64 pads = job->under_mask.size * job->under_mask.count;
    if (number >= 0 && pads) {
        memmove(to->body + begin, to->body + job->under_mask.at, (size_t)pads);
        job->under_mask.at = begin;
        *used = begin + pads;
    }
    if (number < 0) {
        memcpy(to->entries + *to->num_entries, slots, sizeof(Entry) * (size_t)job->count);
        number = (*to->num_entries += job->count) - 1;
        if (out->used) *used = begin + out->used;
    }
    to->fields[at] = number;
    return FITS;
}

/* The most bytes that a job takes in a body. */
static i64 room_of(const Job *job, const Layout *layouts) {
    const Layout *layout = layouts + job->layout;
    i64 elements = elements_of(job, layouts), pads = 17;
    if (job->result == STRAY && job->keeps) elements = layout->rows * layout->width;
    for (i64 pad = 0; job->padded && pad < job->num_pads; pad++)
        if ((job->pads[pad].mode & ~TRUSTED) == BY_SIGNS) pads = layout->width / 8 + 18;
    return (elements * job->items * job->size + pads * job->rows + job->given_size * job->given_count + 4127) & ~(i64)7;
}

/* Opens what a job is encoded to: the rest of a body of `room` bytes from `begin` on, if that is enough whatever it takes, or
   memory of its own. */
static void open_out(Work *work, i64 at, u8 *body, i64 begin, i64 room) {
    Encoded *own = work->encoded + at;
    i64 most = room_of(work->jobs + at, work->layouts);
    int lies = begin + most <= room;
    free_slices(&own->slices);
    free(own->memory);
    own->memory = lies ? NULL : malloc((size_t)most);
    own->out = (Out){lies ? body + begin : own->memory, lies ? begin : 0, 0, most, 0};
}

/* Encodes a job while others are encoded. */
static void encode_apart(void *context, i64 at) {
    open_out(context, at, NULL, 0, 0);
    encode_job(context, at);
}

/* Whether a job was encoded with one that stays padded. */
static int refers_to_padded(const Work *work, const Job *job) {
    i64 others[] = {job->near, job->head, job->tail};
    int refers = 0;
    for (int i = 0; i < 3; i++) refers |= others[i] >= 0 && work->encoded[others[i]].stays_padded;
    return refers;
}

/* Encodes layouts, and fields of these layouts. A job must come after those that it refers to. Returns the bytes of the body
   in use; FAILED if a job failed, whose result tells how; or NO_ROOM less the bytes that are enough in any case. */
API i64 maskpack_encode(Job *jobs, i64 n, const Layout *layouts, i64 m, Stored *stored, Entry *slots, Entry *entries,
                        i64 *num_entries, i64 *fields, u8 *body, i64 there, i64 threads) {
    Packed to = {slots, entries, num_entries, fields, body, there};
    i64 room = 64, bytes = 0;
    for (i64 at = 0; at < m; at++) room += (24 * layouts[at].splits[layouts[at].rows] + 8 * layouts[at].rows + 64) & ~(i64)7;
    for (i64 at = 0; at < n; at++) {
        jobs[at].result = FITS;
        room += room_of(jobs + at, layouts);
        i64 width = jobs[at].padded ? layouts[jobs[at].layout].width : 0;
        bytes += jobs[at].items * jobs[at].size * (width ? jobs[at].rows * width : elements_of(jobs + at, layouts));
    }
    if (!to.room) return NO_ROOM - room;
    i64 used = maskpack_store_layouts(stored, m, layouts, to.body, 0, to.room);
    Crew crew;
    Work work = {jobs, layouts, to.slots, calloc((size_t)n + 1, sizeof(Encoded)), &crew, bytes / (SLICES * threads) + 1};
    int done = used < 0 ? FULL : work.encoded ? FITS : NO_MEMORY;
    *to.num_entries = 0;
    crew_open(&crew, done == FITS ? threads : 1);
    for (i64 at = 0; at < n && done == FITS; at++) work.encoded[at].given = jobs[at];
    if (threads > 1 && done == FITS) share(&crew, encode_apart, &work, n);
    for (i64 at = 0; at < n && done == FITS; at++) {
        if (threads <= 1 || refers_to_padded(&work, jobs + at)) {
            jobs[at] = work.encoded[at].given;
            open_out(&work, at, to.body, (used + 7) & ~(i64)7, to.room);
            encode_job(&work, at);
        }
        work.encoded[at].stays_padded = jobs[at].result == STRAY && jobs[at].keeps;
        if (work.encoded[at].stays_padded) continue;
        done = jobs[at].result == FITS ? settle(&work, at, &to, &used) : (int)jobs[at].result;
    }
    for (i64 at = 0; at < n && done == FITS; at++) {
        if (!work.encoded[at].stays_padded) continue;
        room += room_of(jobs + at, layouts);
        open_out(&work, at, to.body, (used + 7) & ~(i64)7, to.room);
        done = encode_kept(&work, at);
        if (done == FITS) done = settle(&work, at, &to, &used);
    }
    crew_close(&crew);
    for (i64 at = 0; at < n && work.encoded; at++) {
        free_slices(&work.encoded[at].slices);
        free(work.encoded[at].memory);
    }
    free(work.encoded);
    return done == FITS ? used : done == FULL ? NO_ROOM - room : FAILED;
}
