// A library under the driver's second name, with one function of its own (mod.rs beside this file). cudarc asks
// for `libcuda.so` first, and the system's loader gives it the library of that name which the process has
// already; every other function is that of `libcuda.so.1`, which this library needs.

typedef int record_function(void *event, void *stream);

static record_function *driver;
static __thread void *recorded_on;

void coxswain_driver(record_function *record) { driver = record; }

// The stream of the last event that this thread has recorded since it last asked.
void *coxswain_recorded_on(void) {
    void *stream = recorded_on;
    recorded_on = 0;
    return stream;
}

int cuEventRecord(void *event, void *stream) {
    recorded_on = stream;
    return driver(event, stream);
}
