//! Names by content: BLAKE3 digests, each kind in a domain of its own, so that equal bytes of different kinds
//! never collide.
//!
//! Every input is preceded by its length: `("ab", "c")` and `("a", "bc")` have different digests.

use std::{fmt, fs::File, io, path::Path, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// 32 bytes that stand for a content.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

/// What all records of a namespace share, as one name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct NamespaceKey(pub Digest);

/// A sample's content: its encoded images in camera order, and its prompt.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SampleKey(pub Digest);

impl Digest {
    /// The digest of named contents in the order given. `domain` separates kinds of things; it is a constant
    /// of the program.
    pub fn of<'a>(domain: &str, contents: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> Self {
        let mut hash = Hasher::new(domain);
        contents.into_iter().for_each(|(name, bytes)| hash.named(name, bytes));
        hash.finish()
    }

    /// The digest of a file's bytes, whatever its size: it is streamed.
    pub fn of_file(path: &Path) -> io::Result<Self> {
        let mut hash = blake3::Hasher::new_derive_key("coxswain vl cache file v1");
        hash.update_reader(File::open(path)?)?;
        Ok(Self(hash.finalize().into()))
    }

    /// The digest of an image as it is stored in the data set, still encoded.
    pub fn of_image(encoded: &[u8]) -> Self {
        let mut hash = blake3::Hasher::new_derive_key("coxswain vl cache image v1");
        hash.update(encoded);
        Self(hash.finalize().into())
    }
}

impl SampleKey {
    /// From the digests of the sample's images ([`Digest::of_image`]) in camera order and its prompt as it is
    /// tokenized.
    pub fn new(images: &[Digest], prompt: &str) -> Self {
        let mut hash = Hasher::new("coxswain vl cache sample v1");
        images.iter().for_each(|image| hash.named("image", &image.0));
        hash.named("prompt", prompt.as_bytes());
        Self(hash.finish())
    }
}

impl NamespaceKey {
    /// The name of the namespace's directory: half the key, enough that no two ever meet.
    pub fn directory(&self) -> String {
        self.0.hex(16)
    }
}

/// Collects named contents.
pub(super) struct Hasher(blake3::Hasher);

impl Hasher {
    pub(super) fn new(domain: &str) -> Self {
        Self(blake3::Hasher::new_derive_key(domain))
    }

    pub(super) fn named(&mut self, name: &str, bytes: &[u8]) {
        for shard in [name.as_bytes(), bytes] {
            self.0.update(&(shard.len() as u64).to_le_bytes());
            self.0.update(shard);
        }
    }

    pub(super) fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

impl Digest {
    fn hex(&self, bytes: usize) -> String {
        self.0[..bytes].iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.hex(32))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.hex(8))
    }
}

impl fmt::Display for NamespaceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for SampleKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Digest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("{text:?} is not a digest of 64 hexadecimal digits");
        if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(bad());
        }
        let mut bytes = [0; 32];
        for (byte, at) in bytes.iter_mut().zip((0..64).step_by(2)) {
            *byte = u8::from_str_radix(&text[at..at + 2], 16).map_err(|_| bad())?;
        }
        Ok(Self(bytes))
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}
