//! Families of pretrained models that this program reads beside those of the repository: a folder and a line
//! each. `docs/develop/add-a-model.md` says what is in a folder.

mod mosaic;
mod quilt;

use coxswain_models::{Shelf, Shelves, families, pretrained::family::Families, vision_language::VlFamilyOn};
use coxswain_nn::kernels::Tape;

/// The families of this program.
pub fn shelves<B: Tape<Base = B>>() -> Shelves<B> {
    Shelves { device: shelf(), sizes: shelf() }
}

/// On one kind of device: the repository's, and a line for each of ours.
fn shelf<B: Tape<Base = B>>() -> Shelf<B> {
    let ours: [&'static dyn VlFamilyOn<B>; 2] = [&quilt::Family, &mosaic::Family];
    let standard = families::shelf();
    // They live as long as the program, which asks once for each kind of device.
    let all = [standard.vision_language.0, &ours].concat();
    Shelf { vision_language: Families(all.leak()), ..standard }
}
