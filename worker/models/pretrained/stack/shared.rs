//! Blocks of which each rank holds a part (`memory.shard: frozen`; `coxswain_nn::sharded` says what a part
//! is).
//!
//! ```text
//! share_out   once a generation: this rank's chunks of every tensor, read from the files and kept
//! gather      whenever a block runs: this rank's chunks copied, the others' asked of their ranks; those that
//!             do not come are read from the files
//! ```
//!
//! What is used where it lies in the mapped file is not cut up: it takes no memory, and no asking. A rank
//! that is alone has everything in its part, and blocks are made of it without a copy.
//!
//! What this file does not do: know how peers are reached.

use std::{ops::Range, sync::Arc};

use burn::tensor::{AllocationProperty, Bytes, TensorData};
use coxswain_nn::{
    dtypes::WeightsDtype,
    params::chunk,
    pulse,
    sharded::{self, Cut, HeldParts, PartBytes, Peers},
};
use half::{bf16, f16};

use super::{
    super::{checkpoint::kept_as, error::UnreadableWeights},
    files::{Files, TensorRequest},
    part::{Part, PartOwner, TowerShare},
};

const DOMAIN: &str = "coxswain blocks shared out v1";

/// A chunk of a tensor: its elements, and their bytes.
fn elements(wanted: &TensorRequest, cut: Cut) -> Range<usize> {
    chunk(wanted.at.elements(), cut.world, cut.rank)
}

fn bytes(wanted: &TensorRequest, cut: Cut) -> usize {
    elements(wanted, cut).len() * wanted.dtype.bytes() as usize
}

impl Files {
    /// Reads this rank's part of every block.
    fn read_parts(&self, cut: Cut) -> Result<Vec<Arc<Part>>, UnreadableWeights> {
        let part = |index| -> Result<_, UnreadableWeights> {
            let mut part = Part::zeros(self.copied(index).map(|wanted| bytes(wanted, cut)).sum());
            let mut rest = part.bytes_mut();
            for wanted in self.copied(index) {
                pulse::beat();
                let (place, behind) = rest.split_at_mut(bytes(wanted, cut));
                self.checkpoint.fetch_part(&wanted.at, wanted.dtype, elements(wanted, cut), place)?;
                rest = behind;
            }
            Ok(Arc::new(part))
        };
        (0..self.blocks.len()).map(part).collect()
    }

    /// Puts a block together from this rank's part and the others'; none if it is not waited for any more.
    pub(super) fn gather(
        &self,
        index: usize,
        taken: &TowerShare,
        goes_on: &dyn Fn() -> bool,
    ) -> Option<Result<Vec<TensorData>, UnreadableWeights>> {
        let copies = match taken.cut.is_shared() {
            true => match self.gathered(index, taken, goes_on)? {
                Ok(copies) => copies,
                Err(fault) => return Some(Err(fault)),
            },
            false => self.whole(index, taken),
        };
        let mut copies = copies.into_iter();
        let mut tensors = Vec::with_capacity(self.blocks[index].len());
        for wanted in &self.blocks[index] {
            let tensor = match self.copies(wanted) {
                true => {
                    let bytes = copies.next().expect("a buffer was made for each copy");
                    Ok(TensorData::from_bytes(bytes, wanted.at.shape().to_vec(), kept_as(wanted.dtype)))
                }
                false => self.checkpoint.fetch(&wanted.at, wanted.dtype, true),
            };
            match tensor {
                Ok(tensor) => tensors.push(tensor),
                Err(fault) => return Some(Err(fault)),
            }
        }
        goes_on().then_some(Ok(tensors))
    }

    /// The copies of a block whose part is all of it.
    fn whole(&self, index: usize, taken: &TowerShare) -> Vec<Bytes> {
        let part = bytes::Bytes::from_owner(PartOwner(Arc::clone(&taken.parts[index])));
        let mut start = 0;
        let copy = |wanted: &TensorRequest| {
            let piece = part.slice(start..start + bytes(wanted, taken.cut));
            start += piece.len();
            // Elements of two bytes before it may leave it where four bytes cannot begin.
            match (piece.as_ptr() as usize).is_multiple_of(wanted.dtype.bytes() as usize) {
                true => Bytes::from_shared(piece, AllocationProperty::Other),
                false => {
                    let mut copy = zeros(wanted.dtype, wanted.at.elements());
                    copy.copy_from_slice(&piece);
                    copy
                }
            }
        };
        self.copied(index).map(copy).collect()
    }

    /// The copies of a block, this rank's chunks filled in, and those of the others as they come.
    fn gathered(
        &self,
        index: usize,
        taken: &TowerShare,
        goes_on: &dyn Fn() -> bool,
    ) -> Option<Result<Vec<Bytes>, UnreadableWeights>> {
        let Cut { rank: own, world } = taken.cut;
        let mut copies: Vec<Bytes> =
            self.copied(index).map(|wanted| zeros(wanted.dtype, wanted.at.elements())).collect();
        let others = (0..world).filter(|rank| *rank != own);
        let mut asked: Vec<_> =
            others.map(|rank| sharded::Fetch { rank, places: Vec::new(), came: false }).collect();
        let mut part: &[u8] = (*taken.parts[index]).as_ref();
        for (wanted, copy) in self.copied(index).zip(&mut copies) {
            let (mut rest, mut asked) = (&mut copy[..], asked.iter_mut());
            for rank in 0..world {
                let (place, behind) = rest.split_at_mut(bytes(wanted, Cut { rank, world }));
                rest = behind;
                if rank == own {
                    let (chunk, further) = part.split_at(place.len());
                    place.copy_from_slice(chunk);
                    part = further;
                } else if let Some(peer) = asked.next() {
                    peer.places.push(place);
                }
            }
        }
        taken.peers.fetch(taken.first + index, &mut asked, goes_on);
        for missing in asked.into_iter().filter(|peer| !peer.came && !peer.is_empty()) {
            let cut = Cut { rank: missing.rank, world };
            for (wanted, place) in self.copied(index).zip(missing.places) {
                if !goes_on() {
                    return None;
                }
                let read = self.checkpoint.fetch_part(&wanted.at, wanted.dtype, elements(wanted, cut), place);
                if let Err(fault) = read {
                    return Some(Err(fault));
                }
            }
        }
        Some(Ok(copies))
    }

    fn part(&self, index: usize, cut: Cut) -> Option<PartBytes> {
        let taken = self.taken().filter(|taken| taken.cut == cut)?;
        Some(Arc::clone(taken.parts.get(index)?) as PartBytes)
    }
}

/// A buffer for so many elements, aligned for them.
fn zeros(dtype: WeightsDtype, elements: usize) -> Bytes {
    match dtype {
        WeightsDtype::Float32 => Bytes::from_elems(vec![0f32; elements]),
        WeightsDtype::Bfloat16 => Bytes::from_elems(vec![bf16::ZERO; elements]),
        WeightsDtype::Float16 => Bytes::from_elems(vec![f16::ZERO; elements]),
    }
}

/// The blocks of one tower.
pub struct SharedTower(pub(super) Arc<Files>);

/// The blocks of all towers of a model, numbered one tower after the other.
pub struct SharedBlocks {
    towers: Vec<Arc<Files>>,
}

impl SharedBlocks {
    /// The blocks of these towers, in this order.
    pub fn new(towers: Vec<SharedTower>) -> Self {
        Self { towers: towers.into_iter().map(|tower| tower.0).collect() }
    }

    /// Reads this rank's part of every block, unless it has it, and asks `peers` for the others from now on.
    pub fn share_out(&self, cut: Cut, peers: &Arc<dyn Peers>) -> Result<(), UnreadableWeights> {
        let mut first = 0;
        for files in &self.towers {
            let kept = files.taken().filter(|taken| taken.cut == cut).map(|taken| taken.parts.clone());
            let parts = match kept {
                Some(parts) => parts,
                None => {
                    // Another cut's part and this one's are not both in memory.
                    files.take(None);
                    files.read_parts(cut)?
                }
            };
            files.take(Some(TowerShare { cut, parts, peers: Arc::clone(peers), first }));
            first += files.blocks.len();
        }
        Ok(())
    }
}

impl HeldParts for SharedBlocks {
    fn digest(&self) -> [u8; 32] {
        let mut all = blake3::Hasher::new_derive_key(DOMAIN);
        for (tower, files) in self.towers.iter().enumerate() {
            for index in 0..files.blocks.len() {
                for TensorRequest { at, dtype } in files.copied(index) {
                    all.update(format!("{tower} {index} {:?} {dtype:?}\n", at.shape()).as_bytes());
                }
            }
        }
        *all.finalize().as_bytes()
    }

    fn part(&self, block: usize, cut: Cut) -> Option<PartBytes> {
        let mut index = block;
        for files in &self.towers {
            match index.checked_sub(files.blocks.len()) {
                Some(rest) => index = rest,
                None => return files.part(index, cut),
            }
        }
        None
    }
}
