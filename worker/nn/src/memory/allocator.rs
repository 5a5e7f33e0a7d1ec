//! A global allocator that counts. This file is the worker's only boundary to raw allocation.
//!
//! Launching one kernel is some hundred small allocations, on two threads. Counted in one place they wait for
//! each other: that was a tenth of a step's own time on the host. So threads count in places of their own,
//! and tell once it is worth it. What is in use is exact while nothing is taken or given back; a peak may be
//! off by what threads had not told then, less than [`TELLS`] each.

use std::{
    alloc::{GlobalAlloc, Layout},
    cell::Cell,
    sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering::Relaxed},
};

/// Bytes that are told together, taken or given back.
const TELLS: i64 = 4 << 10;
/// Places to count in: one for each of the first threads of a process, and the last for all others, which
/// wait for each other. None is given back: what makes and ends threads uses them up.
const PLACES: usize = 256;

/// Bytes that were taken and given back and not told yet, alone on its cache line.
#[repr(align(128))]
struct Tally(AtomicI64);

static UNTOLD: [Tally; PLACES] = [const { Tally(AtomicI64::new(0)) }; PLACES];
/// Threads so far.
static THREADS: AtomicUsize = AtomicUsize::new(0);
thread_local! {
    // Without a destructor, whose registration would allocate.
    static PLACE: Cell<Option<usize>> = const { Cell::new(None) };
}

/// What was told. A thread may give back what another has not told of, so that it is below 0 for a moment.
static TOLD: AtomicI64 = AtomicI64::new(0);
/// Since somebody restarted or took it last.
static PEAK: AtomicU64 = AtomicU64::new(0);
/// The largest that was taken since the last [`restart_peak`].
static TAKEN: AtomicU64 = AtomicU64::new(0);
/// The largest that was restarted since the last [`take_mark`].
static RESTARTED: AtomicU64 = AtomicU64::new(0);
/// The peak, restarted where guarded work begins and not where a phase's record begins.
static GUARD_PEAK: AtomicU64 = AtomicU64::new(0);

/// Wraps an allocator and counts the bytes it has handed out.
///
/// Install it in the binary: `#[global_allocator] static ALLOCATOR: CountingAllocator<MiMalloc> =
/// CountingAllocator(MiMalloc);` Without it every count stays 0 and only the resident set is known.
#[derive(Debug)]
pub struct CountingAllocator<A>(pub A);

/// Bytes handed out now, from any thread; 0 where [`CountingAllocator`] is not installed.
pub fn in_use() -> u64 {
    let places = THREADS.load(Relaxed).min(PLACES);
    let untold: i64 = UNTOLD[..places].iter().map(|place| place.0.load(Relaxed)).sum();
    (TOLD.load(Relaxed) + untold).max(0) as u64
}

/// Most bytes handed out since the last [`restart_peak`].
pub fn peak() -> u64 {
    PEAK.load(Relaxed).max(TAKEN.load(Relaxed)).max(in_use())
}

/// Lets the peak start again from what is in use now.
pub fn restart_peak() {
    let now = in_use();
    RESTARTED.fetch_max(PEAK.swap(now, Relaxed).max(now), Relaxed);
    TAKEN.store(0, Relaxed);
}

/// Most bytes handed out since the last call, also if the peak is restarted in between; the peak goes on
/// as if nothing was asked. For one caller, which a profile is.
pub fn take_mark() -> u64 {
    let now = in_use();
    let peak = PEAK.swap(now, Relaxed).max(now);
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

fn changed(bytes: i64) {
    let place = PLACE.get().unwrap_or_else(|| {
        let place = THREADS.fetch_add(1, Relaxed).min(PLACES - 1);
        PLACE.set(Some(place));
        place
    });
    let untold = &UNTOLD[place].0;
    if place == PLACES - 1 {
        if (untold.fetch_add(bytes, Relaxed) + bytes).abs() >= TELLS {
            tell(untold.swap(0, Relaxed));
        }
        return;
    }
    // Nobody else writes here. What is told was never here, so that a sum of both does not have it twice.
    let sum = untold.load(Relaxed) + bytes;
    if sum.abs() < TELLS {
        untold.store(sum, Relaxed);
    } else {
        untold.store(0, Relaxed);
        tell(sum);
    }
}

fn tell(bytes: i64) {
    let now = (TOLD.fetch_add(bytes, Relaxed) + bytes).max(0) as u64;
    if bytes > 0 && now > PEAK.load(Relaxed) {
        PEAK.fetch_max(now, Relaxed);
    }
    if bytes > 0 && now > GUARD_PEAK.load(Relaxed) {
        GUARD_PEAK.fetch_max(now, Relaxed);
    }
}

// SAFETY: every call is passed on unchanged to `A`, which is a correct allocator; counting allocates nothing
// and cannot unwind.
unsafe impl<A: GlobalAlloc> GlobalAlloc for CountingAllocator<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps `GlobalAlloc::alloc`'s contract, which is `A`'s.
        let pointer = unsafe { self.0.alloc(layout) };
        if !pointer.is_null() {
            changed(layout.size() as i64);
        }
        pointer
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`.
        let pointer = unsafe { self.0.alloc_zeroed(layout) };
        if !pointer.is_null() {
            changed(layout.size() as i64);
        }
        pointer
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        changed(-(layout.size() as i64));
        // SAFETY: the caller got `pointer` from us with this layout, and we from `A`.
        unsafe { self.0.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: as in `dealloc`; `new_size` is the caller's promise to `A` alike.
        let moved = unsafe { self.0.realloc(pointer, layout, new_size) };
        if !moved.is_null() {
            changed(new_size as i64 - layout.size() as i64);
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;

    /// All that counts in one test: what tests side by side count is seen by all.
    #[test]
    fn what_one_thread_takes_and_another_gives_back_is_not_in_use() {
        let before = in_use();
        let (taken, given) = mpsc::channel();
        let taker = thread::spawn(move || {
            for bytes in [100, 5_000, 70, 1 << 20, 3] {
                changed(bytes);
                taken.send(bytes).expect("somebody listens");
            }
        });
        let mut sum = 0;
        for bytes in given {
            sum += bytes;
            changed(-bytes);
        }
        taker.join().expect("it ends");
        assert_eq!(in_use(), before, "{sum} bytes came and went");
        changed(1 << 20);
        assert_eq!(in_use(), before + (1 << 20));
        assert!(peak() >= in_use());
        restart_peak();
        changed(-(1 << 20));
        assert_eq!((in_use(), peak()), (before, before + (1 << 20)));
    }
}
