//! How long the samples of a file are, for the prediction of memory: the longest is what has to fit. Where
//! file and tokenizer are small every sample is encoded; else lengths are estimated from bytes, of samples
//! all over the file.

/// A tokenizer up to this size is read; larger ones make lengths estimates.
pub const SMALL_TOKENIZER: u64 = 2 << 20;
/// Samples that are looked at.
const LOOKED_AT: u64 = 2000;
/// Bytes of text per token: English has more than 4, and other scripts more bytes a character, so this errs
/// on the long side.
const BYTES_PER_TOKEN: usize = 3;

/// The samples of a file of so many that are looked at, evenly spread; all of a short one.
pub fn looked_at(len: u64) -> impl ExactSizeIterator<Item = u64> {
    let count = len.min(LOOKED_AT);
    (0..count as usize).map(move |number| number as u64 * len / count)
}

/// Tokens of a text of so many bytes.
pub fn estimated(bytes: usize) -> usize {
    bytes.div_ceil(BYTES_PER_TOKEN)
}
