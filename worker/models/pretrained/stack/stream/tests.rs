//! Blocks read while others run: how many there are at once, in which order, and what becomes of a file that
//! changes.

use std::{
    fs::{self, File},
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use burn::backend::{Flex, flex::FlexDevice};

use super::{super::Blocks, *};
use crate::{
    families::qwen2_5_vl::QwenVl,
    pretrained::blocks::BlockWeights,
    two_towers::text::DecoderLayer,
    vision_language::{LoadOptions, VisionLanguage},
};
use coxswain_nn::dtypes::WeightsDtype;
use coxswain_nn::params::TrainableLayout;

/// Stored as bfloat16: as float32 it is a copy.
const COPIED: &str = "configs/assets/tiny-vla";
/// Stored as float32: used where it lies.
const IN_PLACE: &str = "integration-tests/fixtures/golden/flat-gqa-left/model";

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Matrices as float32, its blocks streamed.
fn load(dir: &Path) -> QwenVl<Flex> {
    let options = LoadOptions { blocks: BlockWeights::Streamed, ..WeightsDtype::Float32.into() };
    let mut layout = TrainableLayout::default();
    QwenVl::load(dir, options, None, &mut layout, &FlexDevice).expect("a sound checkpoint")
}

fn decoder(model: &QwenVl<Flex>) -> &StreamedTower<Flex, DecoderLayer<Flex>> {
    match &model.text.layers.0 {
        Blocks::Streamed(streamed) => streamed,
        Blocks::Held(_) => panic!("it was loaded to be streamed"),
    }
}

/// A copy that may be damaged.
fn copy_of(dir: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().expect("a temporary directory");
    for entry in fs::read_dir(repository().join(dir)).expect("part of the repository") {
        let path = entry.expect("readable").path();
        fs::copy(&path, copy.path().join(path.file_name().expect("a file"))).expect("there is room");
    }
    copy
}

fn cut(dir: &Path) {
    let file = File::options().write(true).open(dir.join("model.safetensors")).expect("it is ours");
    let len = file.metadata().expect("it is open").len();
    file.set_len(len / 2).expect("it is ours");
}

fn in_memory(blocks: &StreamedTower<Flex, DecoderLayer<Flex>>) -> u64 {
    blocks.files.now.load(Ordering::Relaxed)
}

#[test]
fn the_next_block_is_read_while_one_runs_and_none_is_there_between_passes() {
    let model = load(&repository().join(COPIED));
    let blocks = decoder(&model);
    let (first, last) = (2, blocks.count() - 1);
    let orders: [Vec<usize>; 2] = [(first..=last).collect(), (first..=last).rev().collect()];
    for order in orders {
        let mut ran = Vec::new();
        blocks
            .fold(order.iter().copied(), (), |(), index, _| {
                ran.push(index);
                let both = Instant::now() + Duration::from_secs(20);
                let alone = blocks.files.bytes(index);
                // All decoder layers are of one size.
                while ran.len() < order.len() && in_memory(blocks) < 2 * alone {
                    assert!(Instant::now() < both, "the next block is not read ahead");
                    thread::yield_now();
                }
                ControlFlow::Continue(())
            })
            .expect("the file is sound");
        assert_eq!((ran, in_memory(blocks)), (order, 0));
    }
    let alone = blocks.files.bytes(0);
    assert!(alone > 0);
    assert_eq!(model.most_streamed(), blocks.most());
}

#[test]
fn two_blocks_are_the_most_there_ever_are() {
    let model = load(&repository().join(COPIED));
    let blocks = decoder(&model);
    for _ in 0..20 {
        blocks.fold(0..blocks.count(), (), |(), _, _| ControlFlow::Continue(())).expect("the file is sound");
    }
    let most = blocks.most();
    let alone = blocks.files.bytes(0);
    assert!(most == alone || most == 2 * alone, "{most} of {alone}");
}

#[test]
fn a_pass_that_breaks_off_or_unwinds_leaves_nothing_behind() {
    let model = load(&repository().join(COPIED));
    let blocks = decoder(&model);
    let left = blocks.fold(0..blocks.count(), 0, |ran, _, _| ControlFlow::Break(ran + 1));
    assert_eq!((left, in_memory(blocks)), (Ok(1), 0));
    let unwinding =
        AssertUnwindSafe(|| blocks.fold(0..blocks.count(), (), |(), _, _| panic!("out of memory")));
    catch_unwind(unwinding).expect_err("it panics");
    assert_eq!(in_memory(blocks), 0);
    let all = blocks.fold(0..blocks.count(), 0, |ran, _, _| ControlFlow::Continue(ran + 1));
    assert_eq!(all, Ok(blocks.count()));
    assert_eq!(blocks.fold(std::iter::empty(), 7, |_, _, _| ControlFlow::Break(0)), Ok(7));
}

#[test]
fn a_file_cut_short_under_way_is_an_error_that_names_it() {
    for stored in [COPIED, IN_PLACE] {
        let copy = copy_of(stored);
        let model = load(copy.path());
        let blocks = decoder(&model);
        let mut ran = 0;
        let fault = blocks.fold(0..blocks.count(), (), |(), index, _| {
            ran += 1;
            if index == 0 {
                cut(copy.path());
            }
            ControlFlow::Continue(())
        });
        let fault = fault.expect_err("half of the file is gone");
        // At most the one that was being read had been read.
        assert!(ran <= 2, "{ran} blocks ran");
        assert_eq!(fault.path, copy.path().join("model.safetensors"));
        assert!(fault.tensor.contains("layers."), "{fault}");
        assert!(fault.problem.contains("the file changed from"), "{fault}");
        assert_eq!(in_memory(blocks), 0);
    }
}

#[test]
fn a_file_that_is_removed_or_replaced_goes_on_being_read() {
    let copy = copy_of(COPIED);
    let model = load(copy.path());
    let path = copy.path().join("model.safetensors");
    fs::write(copy.path().join("other"), b"something else").expect("there is room");
    fs::rename(copy.path().join("other"), &path).expect("it is ours");
    let blocks = decoder(&model);
    let all = blocks.fold(0..blocks.count(), 0, |ran, _, _| ControlFlow::Continue(ran + 1));
    assert_eq!(all, Ok(blocks.count()));
}

#[test]
fn what_lies_in_its_file_as_it_is_wanted_takes_no_memory() {
    let model = load(&repository().join(IN_PLACE));
    let blocks = decoder(&model);
    blocks.fold(0..blocks.count(), (), |(), _, _| ControlFlow::Continue(())).expect("the file is sound");
    assert_eq!(model.most_streamed(), 0);
}
