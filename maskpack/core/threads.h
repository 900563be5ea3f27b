/* Threads: tasks off a counter, joined before return. */

enum { MOST_THREADS = 64 };

typedef struct {
    void (*run)(void *, i64);
    void *context;
    i64 tasks;
    _Atomic i64 next;
} Crew;

static void *work(void *argument) {
    Crew *crew = argument;
    for (i64 task; (task = atomic_fetch_add(&crew->next, 1)) < crew->tasks;) crew->run(crew->context, task);
    return NULL;
}

static void run_tasks(void (*run)(void *, i64), void *context, i64 tasks, i64 threads) {
    Crew crew = {run, context, tasks, 0};
    pthread_t others[MOST_THREADS];
    i64 started = 0;
    if (threads > tasks) threads = tasks;
    while (started + 1 < threads && started < MOST_THREADS && !pthread_create(&others[started], NULL, work, &crew))
        started++;
    work(&crew);
    for (i64 i = 0; i < started; i++) pthread_join(others[i], NULL);
}
