//! What a thread holds, or all threads together, counted by the allocator of the test binaries that this
//! crate is part of.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    sync::atomic::{AtomicBool, AtomicIsize, Ordering::Relaxed},
};

thread_local! {
    /// Bytes that this thread took less those that it gave back, which others may have taken.
    static HELD: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
}

/// Runs `work`; with its result, the most bytes it held at once on this thread.
pub(crate) fn most_during<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.get();
    MOST.set(before);
    let result = work();
    (result, usize::try_from(MOST.get() - before).unwrap_or(0))
}

/// Whether bytes of all threads are counted, from the first call of [`most_of_all_during`] on.
static ALL: AtomicBool = AtomicBool::new(false);
static ALL_HELD: AtomicIsize = AtomicIsize::new(0);
static ALL_MOST: AtomicIsize = AtomicIsize::new(0);

/// Runs `work`; with its result, the most bytes that all threads of the process held at once.
pub(crate) fn most_of_all_during<T>(work: impl FnOnce() -> T) -> (T, usize) {
    ALL.store(true, Relaxed);
    let before = ALL_HELD.load(Relaxed);
    ALL_MOST.store(before, Relaxed);
    let result = work();
    (result, usize::try_from(ALL_MOST.load(Relaxed) - before).unwrap_or(0))
}

struct CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Memory may be taken and given back while a thread ends, when its counters are gone.
fn count(bytes: isize) {
    if ALL.load(Relaxed) {
        let held = ALL_HELD.fetch_add(bytes, Relaxed) + bytes;
        ALL_MOST.fetch_max(held, Relaxed);
    }
    let _ = HELD.try_with(|held| {
        held.set(held.get() + bytes);
        let _ = MOST.try_with(|most| most.set(most.get().max(held.get())));
    });
}

// SAFETY: every call is passed on unchanged to the system's allocator; counting allocates nothing (the cells
// are initialised by constants and have no destructor) and does not unwind.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller keeps `GlobalAlloc::alloc`'s contract, which is that of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as in `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as in `alloc`; what was handed out came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size as isize - layout.size() as isize);
        // SAFETY: as in `dealloc`.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}
