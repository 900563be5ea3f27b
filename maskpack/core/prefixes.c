/* Rows of token ids in the order of a trie. */

/* Rows [rows] of token ids, with `items` numbers beside each: tokens are equal if both are. */
typedef struct {
    const i64 *ids, *beside, *bounds;
    i64 items;
} Tokens;

typedef struct {
    i64 row, key; /* sorted by the key, then by the row */
} Ranked;

/* Rows [low, high) of the order, which share their first `depth` tokens. */
typedef struct {
    i64 low, high, depth;
} Bunch;

static i64 equal_numbers(const i64 *one, const i64 *other, i64 n) {
    i64 at = 0;
    for (; at + 32 <= n; at += 32) {
        i64 differing = 0;
        for (i64 i = at; i < at + 32; i++) differing |= one[i] ^ other[i];
        if (differing) break;
    }
    while (at < n && one[at] == other[at]) at++;
    return at;
}

static i64 tokens_of(const Tokens *tokens, i64 row) { return tokens->bounds[row + 1] - tokens->bounds[row]; }

/* A number that is the same for equal tokens. */
static i64 token_key(const Tokens *tokens, i64 token) {
    u64 key = (u64)tokens->ids[token];
    for (i64 i = 0; i < tokens->items; i++) key = key * 0x9E3779B97F4A7C15u + (u64)tokens->beside[token * tokens->items + i];
    return (i64)key;
}

/* The number of tokens that two rows share, from their first; `depth` are known to be equal. */
static i64 shared_tokens(const Tokens *tokens, i64 row, i64 other, i64 depth) {
    i64 a = tokens->bounds[row] + depth, b = tokens->bounds[other] + depth, items = tokens->items;
    i64 n = tokens_of(tokens, row) < tokens_of(tokens, other) ? tokens_of(tokens, row) : tokens_of(tokens, other);
    n = equal_numbers(tokens->ids + a, tokens->ids + b, n - depth);
    if (items) n = equal_numbers(tokens->beside + a * items, tokens->beside + b * items, n * items) / items;
    return depth + n;
}

static int compare_ranked(const void *one, const void *other) {
    const Ranked *a = one, *b = other;
    if (a->key != b->key) return a->key < b->key ? -1 : 1;
    return (a->row > b->row) - (a->row < b->row);
}

static void sort_ranked(Ranked *rows, i64 n) { qsort(rows, (size_t)n, sizeof *rows, compare_ranked); }

/* Orders rows whose first tokens after `depth` have one key: the first row, then those that share most with it, and so on.
   Those that share equally many are a bunch of their own. Returns the number of bunches. */
static i64 order_alike(const Tokens *tokens, Ranked *rows, i64 n, i64 depth, i64 low, i64 *shared, Bunch *bunches) {
    i64 count = 0;
    for (i64 i = 1; i < n; i++) rows[i].key = -shared_tokens(tokens, rows[i].row, rows[0].row, depth);
    sort_ranked(rows + 1, n - 1);
    for (i64 from = 1, to; from < n; from = to) {
        for (to = from + 1; to < n && rows[to].key == rows[from].key; to++) {}
        shared[from] = -rows[from].key;
        if (to > from + 1) bunches[count++] = (Bunch){low + from, low + to, shared[from]};
    }
    return count;
}

/* Orders a bunch: rows without further tokens, then those with one key of a token, one set after the other by their first rows.
   Writes how many tokens each shares with the row before. Returns the number of bunches that are left to be ordered. */
static i64 order_bunch(const Tokens *tokens, Ranked *rows, Bunch bunch, i64 *shared, Bunch *bunches) {
    i64 ended = 0, n = bunch.high - bunch.low, count = 0, depth = bunch.depth;
    Ranked *own = rows + bunch.low;
    shared += bunch.low;
    for (i64 i = 0; i < n; i++) own[i].key = tokens_of(tokens, own[i].row) > depth; /* rows without tokens first */
    sort_ranked(own, n);
    while (ended < n && !own[ended].key) ended++;
    for (i64 i = ended; i < n; i++) own[i].key = token_key(tokens, tokens->bounds[own[i].row] + depth);
    sort_ranked(own + ended, n - ended);
    for (i64 from = ended, to; from < n; from = to) {
        i64 key = own[from].key, first = own[from].row;
        for (to = from; to < n && own[to].key == key; to++) own[to].key = first;
    }
    sort_ranked(own + ended, n - ended);
    for (i64 i = 1; i < n; i++) shared[i] = depth;
    for (i64 from = ended, to; from < n; from = to) {
        i64 first = own[from].key;
        for (to = from + 1; to < n && own[to].key == first; to++) {}
        count += order_alike(tokens, own + from, to - from, depth, bunch.low + from, shared + from, bunches + count);
    }
    return count;
}

/* Orders rows so that those with a common prefix are next to each other, at every depth: `order` and `shared` [rows], the
   number of tokens that each shares with the row before. Returns -1 without memory. */
API i64 maskpack_order_prefixes(const i64 *ids, const i64 *beside, i64 items, const i64 *bounds, i64 rows, i64 *order, i64 *shared) {
    Tokens tokens = {ids, beside, bounds, items};
    Ranked *ranked = malloc((size_t)(rows + 1) * sizeof *ranked);
    Bunch *bunches = malloc((size_t)(rows + 1) * sizeof *bunches); /* each has two rows, so there are never more */
    i64 left = 0, fine = ranked && bunches;
    if (fine) {
        for (i64 row = 0; row < rows; row++) ranked[row].row = row;
        if (rows) shared[0] = 0;
        if (rows > 1) bunches[left++] = (Bunch){0, rows, 0};
        while (left) {
            Bunch bunch = bunches[--left];
            left += order_bunch(&tokens, ranked, bunch, shared, bunches + left);
        }
        for (i64 i = 0; i < rows; i++) order[i] = ranked[i].row;
    }
    free(ranked);
    free(bunches);
    return fine ? 0 : -1;
}
