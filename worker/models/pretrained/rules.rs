//! What a family's names mean: the rules by which shared code reads checkpoints of any family.

/// A family's rules for the names of its modules and tensors.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// The path that Transformers 5 gives a module or tensor, for its name in any spelling that files have.
    pub canonical: fn(&str) -> String,
    /// Where the module or tensor of a canonical name is.
    pub place: fn(&str) -> Place,
    /// Whether the weight of a linear is quantized where that is asked for. bitsandbytes leaves out what a
    /// user names; families leave out what is commonly named.
    pub packs: fn(&str) -> bool,
}

/// A part of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The vision tower: one of its repeated blocks, or what it has besides them.
    Vision(Option<usize>),
    /// The table of token embeddings.
    Table,
    /// A decoder layer.
    Layer(usize),
    /// The norm after the last decoder layer.
    FinalNorm,
    /// The LM head.
    Head,
    /// A part that has no name here.
    Other,
}

impl Place {
    /// The repeated block that a name is part of, given what its path begins with before the block's number.
    pub fn number(name: &str, before: &str) -> Option<usize> {
        name.strip_prefix(before)?.split('.').next()?.parse().ok()
    }
}
