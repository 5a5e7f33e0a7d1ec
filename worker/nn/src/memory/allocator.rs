//! A global allocator that counts. This file is the worker's only boundary to raw allocation.

use std::{
    alloc::{GlobalAlloc, Layout},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

static IN_USE: AtomicU64 = AtomicU64::new(0);
/// Since somebody restarted or took it last.
static PEAK: AtomicU64 = AtomicU64::new(0);
/// The largest that was taken since the last [`restart_peak`].
static TAKEN: AtomicU64 = AtomicU64::new(0);
/// The largest that was restarted since the last [`take_mark`].
static RESTARTED: AtomicU64 = AtomicU64::new(0);
/// The same, restarted where guarded work begins and not where a phase's record begins.
static GUARD_PEAK: AtomicU64 = AtomicU64::new(0);

/// Wraps an allocator and counts the bytes it has handed out.
///
/// Install it in the binary: `#[global_allocator] static ALLOCATOR: CountingAllocator<MiMalloc> =
/// CountingAllocator(MiMalloc);` Without it every count stays 0 and only the resident set is known.
#[derive(Debug)]
pub struct CountingAllocator<A>(pub A);

/// Bytes handed out now, from any thread; 0 where [`CountingAllocator`] is not installed.
pub fn in_use() -> u64 {
    IN_USE.load(Relaxed)
}

/// Most bytes handed out since the last [`restart_peak`].
pub fn peak() -> u64 {
    PEAK.load(Relaxed).max(TAKEN.load(Relaxed))
}

/// Lets the peak start again from what is in use now.
pub fn restart_peak() {
    RESTARTED.fetch_max(PEAK.swap(in_use(), Relaxed), Relaxed);
    TAKEN.store(0, Relaxed);
}

/// Most bytes handed out since the last call, also if the peak is restarted in between; the peak goes on
/// as if nothing was asked. For one caller, which a profile is.
pub fn take_mark() -> u64 {
    let peak = PEAK.swap(in_use(), Relaxed);
    TAKEN.fetch_max(peak, Relaxed);
    peak.max(RESTARTED.swap(0, Relaxed))
}

/// Most bytes handed out since the last [`restart_guard_peak`].
pub fn guard_peak() -> u64 {
    GUARD_PEAK.load(Relaxed)
}

/// Lets the guard's peak start again from what is in use now.
pub fn restart_guard_peak() {
    GUARD_PEAK.store(in_use(), Relaxed);
}

fn grew(bytes: usize) {
    let now = IN_USE.fetch_add(bytes as u64, Relaxed) + bytes as u64;
    if now > PEAK.load(Relaxed) {
        PEAK.fetch_max(now, Relaxed);
    }
    if now > GUARD_PEAK.load(Relaxed) {
        GUARD_PEAK.fetch_max(now, Relaxed);
    }
}

fn shrank(bytes: usize) {
    IN_USE.fetch_sub(bytes as u64, Relaxed);
}

// SAFETY: every call is passed on unchanged to `A`, which is a correct allocator; counting allocates nothing
// and cannot unwind.
unsafe impl<A: GlobalAlloc> GlobalAlloc for CountingAllocator<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps `GlobalAlloc::alloc`'s contract, which is `A`'s.
        let pointer = unsafe { self.0.alloc(layout) };
        if !pointer.is_null() {
            grew(layout.size());
        }
        pointer
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`.
        let pointer = unsafe { self.0.alloc_zeroed(layout) };
        if !pointer.is_null() {
            grew(layout.size());
        }
        pointer
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        shrank(layout.size());
        // SAFETY: the caller got `pointer` from us with this layout, and we from `A`.
        unsafe { self.0.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: as in `dealloc`; `new_size` is the caller's promise to `A` alike.
        let moved = unsafe { self.0.realloc(pointer, layout, new_size) };
        if !moved.is_null() {
            if new_size >= layout.size() {
                grew(new_size - layout.size());
            } else {
                shrank(layout.size() - new_size);
            }
        }
        moved
    }
}
