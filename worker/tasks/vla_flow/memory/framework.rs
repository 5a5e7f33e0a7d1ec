//! What is held besides weights and activations: read-ahead, caches, scratch, and what the process takes by
//! itself.

use super::{Ask, Place, Subject};
use coxswain_data::lerobot::rows;
use coxswain_task::memory::PROCESS;

/// A second-level cache where the system does not tell its size.
const USUAL_L2: u64 = 1 << 20;
/// Bytes that a tokenizer takes for each byte of its file.
const TOKENIZER: u64 = 8;

/// Read-ahead, row cache and decoders of video. On a GPU only the micro-batch that runs is there, which is
/// counted with the activations.
pub(super) fn input_bytes(subject: &Subject, ask: Ask) -> u64 {
    if ask.place == Place::Gpu {
        return 0;
    }
    let sample = sample_bytes(subject);
    let ahead = subject.spec.data.prefetch.max(1) as u64 + 1;
    let batch = ask.micro_batch.min(subject.spec.train.global_batch as u64);
    // Where features may be missing, an encoder batch is kept ready.
    let encoder_batch = subject.tap().and(subject.spec.cache.encoder_batch).unwrap_or(0) as u64;
    let row_cache = rows::Limits::default().cache_bytes as u64;
    let read = row_cache.min(subject.outline.data_bytes) + subject.outline.video_bytes;
    (ahead * batch).max(encoder_batch + batch) * sample + read
}

/// One sample as the data threads hand it over.
fn sample_bytes(subject: &Subject) -> u64 {
    let outline = &subject.outline;
    let dims = outline.dims;
    let numbers = dims.state + dims.sensor_window * dims.sensor_channels + dims.horizon * (dims.action + 1);
    let pixels = outline.patches * subject.model.patches.columns() as u64;
    // Rows whose features are kept bring these instead; the first epoch still brings pixels.
    let features = subject.tap().map_or(0, |tap| subject.feature_values(tap));
    4 * (pixels.max(features) + outline.prompt_tokens as u64 + numbers as u64)
}

/// Memory of a process on the host, with a tokenizer of this size and so many compute threads.
pub(crate) fn of_process(tokenizer: u64, threads: u64, scratch: u64) -> u64 {
    // The `gemm` crate keeps a packing buffer of the size of the second-level cache on every thread that
    // multiplies.
    PROCESS + TOKENIZER * tokenizer + threads * (scratch + second_level_cache())
}

fn second_level_cache() -> u64 {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index2/size").unwrap_or_default();
    let kibibytes = text.trim().strip_suffix('K').and_then(|number| number.parse::<u64>().ok());
    kibibytes.map_or(USUAL_L2, |kibibytes| kibibytes << 10)
}
