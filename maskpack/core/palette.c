/* Words as numbers of the distinct ones. */

enum { MOST_COLOURS = 1 << 16, SLOTS = 2 * MOST_COLOURS };

/* Writes the number of each word of 4 bytes among the distinct ones, which go to `palette` [MOST_COLOURS] in the order of
   their first appearance. Returns how many there are: -1 if more than fit into 2 bytes, -2 without memory. */
API i64 maskpack_palette(const u32 *words, i64 n, uint16_t *numbers, u32 *palette) {
    i64 count = 0;
    u32 *slots = calloc(SLOTS, sizeof *slots); /* 1 + the number of the word that lies there; 0 for none */
    if (!slots) return -2;
    for (i64 i = 0; i < n; i++) {
        if (i && words[i] == words[i - 1]) {
            numbers[i] = numbers[i - 1];
            continue;
        }
        u32 at = (words[i] * 2654435761u) >> 15; /* the highest bits of the product, as many as number the slots */
        while (slots[at] && palette[slots[at] - 1] != words[i]) at = (at + 1) & (SLOTS - 1);
        if (!slots[at]) {
            if (count == MOST_COLOURS) {
                free(slots);
                return -1;
            }
            palette[count++] = words[i];
            slots[at] = (u32)count;
        }
        numbers[i] = (uint16_t)(slots[at] - 1);
    }
    free(slots);
    return count;
}
