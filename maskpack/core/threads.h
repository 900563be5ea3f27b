/* Threads: a crew takes tasks, and tasks may share out tasks of their own. All are joined before return. */

enum { MOST_THREADS = 64 };

/* `count` tasks, of which number `next` is to be taken and `left` are not done; `below` are others that wait. */
typedef struct Tasks Tasks;
struct Tasks {
    void (*run)(void *, i64);
    void *context;
    i64 count, next, left;
    Tasks *below;
};

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Tasks *open; /* the latest first */
    i64 closed, started;
    pthread_t others[MOST_THREADS];
} Crew;

/* Takes a task, if there is one, with the lock that it has; whether it did. */
static int run_next(Crew *crew, Tasks *tasks) {
    while (tasks && tasks->next == tasks->count) tasks = tasks->below;
    if (!tasks) return 0;
    i64 task = tasks->next++;
    pthread_mutex_unlock(&crew->lock);
    tasks->run(tasks->context, task);
    pthread_mutex_lock(&crew->lock);
    if (!--tasks->left) pthread_cond_broadcast(&crew->changed);
    return 1;
}

static void *work(void *argument) {
    Crew *crew = argument;
    pthread_mutex_lock(&crew->lock);
    while (!crew->closed)
        if (!run_next(crew, crew->open)) pthread_cond_wait(&crew->changed, &crew->lock);
    pthread_mutex_unlock(&crew->lock);
    return NULL;
}

/* Starts the threads of a crew beside this one; it does its tasks itself if there are none. */
static void crew_open(Crew *crew, i64 threads) {
    crew->open = NULL;
    crew->closed = crew->started = 0;
    pthread_mutex_init(&crew->lock, NULL);
    pthread_cond_init(&crew->changed, NULL);
    while (crew->started + 1 < threads && crew->started < MOST_THREADS &&
           !pthread_create(&crew->others[crew->started], NULL, work, crew))
        crew->started++;
}

static void crew_close(Crew *crew) {
    pthread_mutex_lock(&crew->lock);
    crew->closed = 1;
    pthread_cond_broadcast(&crew->changed);
    pthread_mutex_unlock(&crew->lock);
    for (i64 i = 0; i < crew->started; i++) pthread_join(crew->others[i], NULL);
    pthread_cond_destroy(&crew->changed);
    pthread_mutex_destroy(&crew->lock);
}

/* Runs tasks, some of them in the other threads of a crew; returns when all are done. */
static void share(Crew *crew, void (*run)(void *, i64), void *context, i64 count) {
    Tasks own = {run, context, count, 0, count, NULL}, **place = &crew->open;
    pthread_mutex_lock(&crew->lock);
    own.below = crew->open;
    crew->open = &own;
    pthread_cond_broadcast(&crew->changed);
    while (own.next < own.count) run_next(crew, &own);
    while (own.left) pthread_cond_wait(&crew->changed, &crew->lock);
    while (*place != &own) place = &(*place)->below;
    *place = own.below;
    pthread_mutex_unlock(&crew->lock);
}

/* Tasks for rows: one for one thread, four a thread for several. The rows of a task begin where those of the one before end. */
static i64 parts_for(i64 threads) { return threads == 1 ? 1 : 4 * threads; }

static i64 first_row(i64 rows, i64 part, i64 parts) { return rows * part / parts; }

static void run_tasks(void (*run)(void *, i64), void *context, i64 tasks, i64 threads) {
    Crew crew;
    crew_open(&crew, threads < tasks ? threads : tasks);
    share(&crew, run, context, tasks);
    crew_close(&crew);
}
