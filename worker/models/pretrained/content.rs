//! A name for what a model directory holds, wherever it lies: two places of one name hold the same model.
//!
//! ```text
//! files beside the weights that are read     every byte
//! each tensor                                name, type and shape; of its values every byte up to 32 KiB,
//!                                            else 8 pieces of 4 KiB from its first to its last
//! ```
//!
//! So at most 32 KiB a tensor are read, 26 MiB of a model of 7.5 GB with 824 tensors, few enough for every
//! worker to find it. How tensors are spread over files, and in which of two spellings they are named, is no
//! part of it.
//!
//! What it does not do: prove. Training, merging, rounding and quantizing change values everywhere, and show;
//! a change of a few values of a large tensor may not. So it is with values that are not finite, for which a
//! model is refused where they are seen.

use std::{io, path::Path};

use coxswain_proto::{bounded, limits::MAX_METADATA_BYTES};
use rayon::prelude::*;
use safetensors::Dtype;

use super::{
    checkpoint::Checkpoint,
    error::ModelError,
    rules::{Place, Rules},
};

const DOMAIN: &str = "coxswain pretrained model v1";
/// What is read of a model directory besides its weights, where it is there.
pub(super) const BESIDE: [&str; 8] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "spiece.model",
];
/// What is read besides where `spiece.model` is all of a tokenizer: tokens that were added to it.
const ADDED: &str = "added_tokens.json";
const PIECE: usize = 4 << 10;
const PIECES: usize = 8;

/// The name of what `dir` holds, a model whose names follow these rules: lower-case hex BLAKE3.
pub fn digest(dir: &Path, rules: Rules) -> Result<String, ModelError> {
    let mut all = blake3::Hasher::new_derive_key(DOMAIN);
    let is_spiece = !dir.join("tokenizer.json").is_file();
    for name in BESIDE.into_iter().chain(is_spiece.then_some(ADDED)) {
        let path = dir.join(name);
        match bounded::read(&path, MAX_METADATA_BYTES) {
            Ok(bytes) => all.update(format!("{name}\n").as_bytes()).update(blake3::hash(&bytes).as_bytes()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(source) => return Err(ModelError::Io { path, source, remedy: "make the file readable" }),
        };
    }
    let checkpoint = Checkpoint::open(dir, rules)?;
    let mut names: Vec<_> = checkpoint.names().collect();
    names.sort_unstable();
    let named = |name: &&str| {
        let (dtype, shape, bytes) = checkpoint.stored(name)?;
        let mut hasher = blake3::Hasher::new();
        hasher.update(format!("{name} {dtype:?} {shape:?}\n").as_bytes());
        let computes = (rules.place)(name) != Place::Other;
        for piece in sampled(bytes) {
            if computes && !is_finite(dtype, whole(dtype, bytes, piece)) {
                return Err(checkpoint.not_finite(name));
            }
            hasher.update(piece);
        }
        Ok(hasher.finalize())
    };
    let hashes: Vec<_> = names.par_iter().map(named).collect::<Result<_, ModelError>>()?;
    hashes.iter().for_each(|hash| {
        all.update(hash.as_bytes());
    });
    Ok(all.finalize().to_hex().to_string())
}

/// All of a few bytes; pieces of many, the first and the last among them.
fn sampled(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let (count, piece) = if bytes.len() <= PIECES * PIECE { (1, bytes.len()) } else { (PIECES, PIECE) };
    (0..count).map(move |at| {
        let start = (bytes.len() - piece) / (count - 1).max(1) * at;
        let start = if at + 1 == count { bytes.len() - piece } else { start };
        &bytes[start..start + piece]
    })
}

/// A piece of a tensor's bytes without the parts of values that it begins and ends with.
fn whole<'a>(dtype: Dtype, bytes: &[u8], piece: &'a [u8]) -> &'a [u8] {
    let (start, size) = (piece.as_ptr().addr() - bytes.as_ptr().addr(), dtype.bitsize().div_ceil(8));
    piece.get(start.next_multiple_of(size) - start..).unwrap_or_default()
}

/// Whether all floating-point values in a piece of a tensor are finite: not all bits of an exponent are set.
fn is_finite(dtype: Dtype, piece: &[u8]) -> bool {
    let halves = |exponent: u16| {
        let mut values = piece.as_chunks::<2>().0.iter().map(|le| u16::from_le_bytes(*le));
        values.all(|bits| bits & exponent != exponent)
    };
    match dtype {
        Dtype::BF16 => halves(0x7f80),
        Dtype::F16 => halves(0x7c00),
        Dtype::F32 => piece.as_chunks::<4>().0.iter().all(|le| f32::from_le_bytes(*le).is_finite()),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::HashMap, fs, path::PathBuf};

    use proptest::prelude::*;
    use safetensors::tensor::TensorView;

    use super::*;

    const NAMES: [&str; 2] = ["old.layers.0.mlp.up_proj.weight", "old.merger.ln_q.weight"];
    /// Two spellings: with `old.` and without it.
    const RULES: Rules = Rules {
        canonical: |name| name.trim_start_matches("old.").into(),
        place: |_| Place::Other,
        packs: |_| true,
    };

    /// A model of a large tensor and a small one, whose bytes `change` has seen.
    fn model(dir: &Path, change: impl Fn(&mut [Vec<u8>; 2])) -> String {
        let counted = |count: usize| (0..count).map(|at| (at % 251) as u8).collect::<Vec<u8>>();
        let mut tensors = [counted(2 * 100_000), counted(2 * 64)];
        change(&mut tensors);
        let views = NAMES.iter().zip(&tensors).map(|(name, bytes)| {
            (*name, TensorView::new(Dtype::BF16, vec![bytes.len() / 2], bytes).expect("its size"))
        });
        let file = dir.join("model.safetensors");
        safetensors::serialize_to_file(views, None, &file).expect("a directory of ours");
        fs::write(dir.join("config.json"), "{}").expect("a directory of ours");
        digest(dir, RULES).expect("it is sound")
    }

    fn new() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().expect("a place for temporary files");
        let path = dir.path().to_path_buf();
        (dir, path)
    }

    #[test]
    fn it_names_values_and_what_stands_beside_them_and_no_place() {
        let ((_one, one), (_other, other)) = (new(), new());
        let name = model(&one, |_| {});
        assert_eq!(model(&other, |_| {}), name, "it may be moved");
        fs::write(other.join("README.md"), "of no use").expect("a directory of ours");
        assert_eq!(digest(&other, RULES).expect("sound"), name);
        for (tensor, at) in [(0, 0), (0, 199_999), (1, 77)] {
            assert_ne!(model(&other, |tensors| tensors[tensor][at] ^= 1), name, "{tensor} {at}");
        }
        assert_ne!(model(&other, |tensors| tensors[0].iter_mut().for_each(|byte| *byte ^= 1)), name);
        assert_ne!(model(&other, |tensors| tensors[1].truncate(126)), name);
        model(&other, |_| {});
        fs::write(other.join("tokenizer.json"), "{}").expect("a directory of ours");
        assert_ne!(digest(&other, RULES).expect("sound"), name);
    }

    #[test]
    fn shards_and_spellings_are_no_part_of_it() {
        let ((_one, one), (_other, other)) = (new(), new());
        let name = model(&one, |_| {});
        let whole = Checkpoint::open(&one, RULES).expect("sound");
        let mut map = HashMap::new();
        for (number, canonical) in whole.names().enumerate() {
            let (dtype, shape, bytes) = whole.stored(canonical).expect("it has a name");
            let file = format!("model-{number}.safetensors");
            let view = TensorView::new(dtype, shape.to_vec(), bytes).expect("as it was stored");
            safetensors::serialize_to_file([(canonical, view)], None, &other.join(&file)).expect("ours");
            map.insert(canonical, file);
        }
        let index = serde_json::json!({"weight_map": map}).to_string();
        fs::write(other.join("model.safetensors.index.json"), index).expect("ours");
        fs::write(other.join("config.json"), "{}").expect("ours");
        assert_eq!(digest(&other, RULES).expect("sound"), name);
    }

    #[test]
    fn a_weight_that_is_not_finite_is_named() {
        let (_dir, dir) = new();
        let of_layers = Rules { place: |_| Place::Layer(0), ..RULES };
        model(&dir, |_| {});
        digest(&dir, of_layers).expect("all bytes are below 251");
        model(&dir, |tensors| {
            // The second of its pieces begins within a value.
            tensors[0].truncate(199_992);
            tensors[0].iter_mut().enumerate().for_each(|(at, byte)| *byte = [0x7f, 0x80][at % 2]);
        });
        digest(&dir, of_layers).expect("all values are small");
        model(&dir, |tensors| tensors[0][..2].copy_from_slice(&[0x80, 0x7f]));
        let error = digest(&dir, of_layers).expect_err("infinity").to_string();
        assert!(
            error.contains("model.safetensors") && error.contains("`old.layers.0.mlp.up_proj.weight`"),
            "{error}"
        );
        digest(&dir, RULES).expect("what no family knows may hold anything");
        for (dtype, bad) in [
            (Dtype::F16, [0, 0x7c].to_vec()),
            (Dtype::BF16, [0xc0, 0xff].to_vec()),
            (Dtype::F32, f32::NAN.to_le_bytes().to_vec()),
        ] {
            assert!(!is_finite(dtype, &bad) && is_finite(dtype, &[0, 0x3c, 0, 0x3c]), "{dtype:?}");
        }
        assert!(is_finite(Dtype::I16, &[0xff, 0xff]));
    }

    #[test]
    fn what_is_no_model_has_none() {
        let (_dir, dir) = new();
        assert!(matches!(digest(&dir, RULES), Err(ModelError::Io { .. })));
        model(&dir, |_| {});
        std::os::unix::fs::symlink("/dev/null", dir.join("tokenizer.json")).expect("a directory of ours");
        let error = digest(&dir, RULES).expect_err("a device is no file").to_string();
        assert!(error.contains("tokenizer.json"), "{error}");
    }

    proptest! {
        #[test]
        fn pieces_lie_within_in_order_from_end_to_end(len in 0_usize..300_000) {
            let bytes = vec![0; len];
            let base = bytes.as_ptr() as usize;
            let places: Vec<_> = sampled(&bytes).map(|piece| (piece.as_ptr() as usize - base, piece.len())).collect();
            let read: usize = places.iter().map(|(_, len)| len).sum();
            prop_assert!(read == len.min(PIECES * PIECE));
            prop_assert!(places.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
            prop_assert_eq!((places[0].0, places.last().map(|(at, len)| at + len)), (0, Some(len)));
        }
    }
}
