//! Decoding leaves nothing behind: as many bytes are allocated after a thousand pictures as after a hundred.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    path::Path,
    sync::atomic::{AtomicIsize, Ordering},
};

use coxswain_video::{DecoderPool, Video};

/// Bytes that are allocated now.
static IN_USE: AtomicIsize = AtomicIsize::new(0);

struct Counting;

// SAFETY: every call is the system allocator's own.
unsafe impl GlobalAlloc for Counting {
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
static ALLOCATOR: Counting = Counting;

/// Decodes so many frames, one at a time, and says how many bytes are in use then.
fn after(frames: usize, pool: &DecoderPool, videos: &[Video]) -> isize {
    for n in 0..frames {
        let video = &videos[n % videos.len()];
        pool.decode(video, &[n * 7 % video.index().frames()], &mut |_, picture| assert!(picture.is_ok()));
    }
    IN_USE.load(Ordering::Relaxed)
}

#[test]
fn no_byte_is_lost_with_a_picture() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    for files in [["av1_g2.mp4", "av1_joined.mp4"], ["h264_g12_b.mp4", "h264_joined.mp4"]] {
        let videos = files.map(|file| Video::open(&fixtures.join(file)).expect("it ships"));
        let pool = DecoderPool::new(1);
        let early = after(100, &pool, &videos);
        let late = after(1000, &pool, &videos);
        // Buffers that grow with the largest sample may still do so; the picture's own bytes may not.
        assert!(late - early < 16 << 10, "{files:?}: {early} bytes, then {late}");
    }
}
