//! The resident set while random frames of many files are decoded, one at a time: it is to stay where it is.
//!
//!     cargo run --release -p coxswain-video --example many_files -- FRAMES DECODERS FILE...

use std::{fs, path::Path};

use coxswain_video::{DecoderPool, Video};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [frames, decoders, files @ ..] = &args[..] else {
        println!("usage: many_files FRAMES DECODERS FILE...");
        return;
    };
    let (Ok(frames), Ok(decoders)) = (frames.parse::<usize>(), decoders.parse()) else {
        println!("FRAMES and DECODERS are numbers");
        return;
    };
    let before = resident_kib();
    let videos: Result<Vec<Video>, _> = files.iter().map(|file| Video::open(Path::new(file))).collect();
    let videos = match videos {
        Ok(videos) if !videos.is_empty() => videos,
        Ok(_) => return println!("name at least one file"),
        Err(error) => return println!("{error}"),
    };
    let pool = DecoderPool::new(decoders);
    let largest = videos.iter().map(|video| video.index().width * video.index().height * 3).max();
    let mut rgb = vec![0; largest.unwrap_or(0)];
    let mut state = 1_u64;
    let mut next = move |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    for frame in 1..=frames {
        let video = &videos[next(videos.len())];
        let wish = next(video.index().frames());
        let bytes = video.index().width * video.index().height * 3;
        pool.decode(video, &[wish], &mut |_, picture| match picture {
            Ok(picture) => picture.write_rgb(&mut rgb[..bytes]),
            Err(error) => println!("{error}"),
        });
        if frame % (frames / 10).max(1) == 0 {
            let resident = (resident_kib() - before) as f64 / 1024.0;
            println!(
                "{frame} frames: {resident:.1} MiB more than before the first file, {:?}",
                pool.counts()
            );
        }
    }
}

/// Pages of this process in memory, of 4 KiB.
fn resident_kib() -> i64 {
    let text = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split(' ').nth(1).and_then(|pages| pages.parse::<i64>().ok()).unwrap_or(0) * 4
}
