//! Decoding leaves nothing behind: as many bytes are allocated after a thousand frames as after a hundred.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    path::Path,
    sync::atomic::{AtomicIsize, Ordering},
};

use coxswain_video::{DecoderPool, Video};

/// As many as the shortest of the clips has, and even: each frame is of the same clip in every round.
const FRAMES: usize = 12;

/// Bytes that are allocated now.
static IN_USE: AtomicIsize = AtomicIsize::new(0);

struct CountingAllocator;

// SAFETY: every call is the system allocator's own.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        IN_USE.fetch_add(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Decodes the same frames so many times, one at a time, and says how many bytes are in use then: a decoder
/// stands where it stood the last time, with as many references.
fn after(rounds: usize, pool: &DecoderPool, videos: &[Video]) -> isize {
    for n in 0..rounds * FRAMES {
        let video = &videos[n % videos.len()];
        pool.decode(video, &[n * 7 % FRAMES], &mut |_, picture| assert!(picture.is_ok()));
    }
    IN_USE.load(Ordering::Relaxed)
}

#[test]
fn no_byte_is_lost_with_a_picture() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    for files in [["av1_g2.mp4", "av1_joined.mp4"], ["h264_g12_b.mp4", "h264_joined.mp4"]] {
        let videos = files.map(|file| Video::open(&fixtures.join(file)).expect("it ships"));
        let pool = DecoderPool::new(1);
        let early = after(10, &pool, &videos);
        let late = after(100, &pool, &videos);
        // A byte for each of 1,200 frames would be less.
        assert!(late - early < 1024, "{files:?}: {early} bytes, then {late}");
    }
}
