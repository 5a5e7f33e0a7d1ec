//! Milliseconds a frame for single random frames of one file, RGB out, one thread.
//! `tests/bench_peer.py` runs it turn by turn beside PyAV.
//!
//!     cargo run --release -p coxswain-video --example random_access -- FILE [FRAMES [SEED]]

use std::path::Path;
use std::time::Instant;

use coxswain_video::{ASSEMBLY, DecoderPool, Video};

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let number = |n: usize, usual: u64| args.get(n).and_then(|arg| arg.parse().ok()).unwrap_or(usual);
    let Some(file) = args.get(1) else {
        println!("usage: random_access FILE [FRAMES [SEED]]");
        return;
    };
    let (frames, mut state) = (number(2, 200), number(3, 1));
    match Video::open(Path::new(file)) {
        Err(error) => println!("{error}"),
        Ok(video) => {
            let pool = DecoderPool::new(1);
            let index = video.index();
            let mut rgb = vec![0; index.width * index.height * 3];
            let begun = Instant::now();
            for _ in 0..frames {
                // The generator of bench_peer.py: both ask for the same frames.
                state = (state * 1_103_515_245 + 12_345) % (1 << 31);
                let frame = (state >> 8) as usize % index.frames();
                pool.decode(&video, &[frame], &mut |_, picture| match picture {
                    Ok(picture) => picture.write_rgb(&mut rgb),
                    Err(error) => println!("{error}"),
                });
            }
            let each = begun.elapsed().as_secs_f64() * 1000.0 / frames as f64;
            println!("{each:.3} ms a frame, assembly {ASSEMBLY}, {:?}", pool.counts());
        }
    }
}
