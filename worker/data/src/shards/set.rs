//! Samples of all shards by number: 12 bytes of memory a member, whatever it holds, and 4 a sample.

use std::{
    collections::HashMap,
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use coxswain_proto::bounded;

use super::{
    pattern::expand,
    scan::{BLOCK, PassedOver, at_byte, header_at, name_in, scan},
    section::Section,
};
use crate::{DataError, Fingerprint};

/// Bytes of a member that is read as a whole.
const LARGEST: u32 = 256 << 20;

/// A member among those of all shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemberId(u32);

/// Where a member lies in its shard.
#[derive(Clone, Copy, Debug)]
struct Member {
    block: u32,
    bytes: u32,
    ending: u16,
}

/// One tar file.
#[derive(Debug)]
struct Shard {
    path: PathBuf,
    /// First member.
    members: u32,
}

/// Opened shards: where every member of every sample lies. Shared between threads.
///
/// Files are opened for each reading, so that any number of shards takes few descriptors.
#[derive(Debug)]
pub struct Shards {
    shards: Vec<Shard>,
    members: Vec<Member>,
    /// The first member of each sample.
    samples: Vec<u32>,
    endings: Vec<String>,
    passed_over: PassedOver,
    fingerprint: Fingerprint,
}

impl Shards {
    /// Scans the files that a pattern names.
    pub fn open(pattern: &Path) -> Result<Self, DataError> {
        let mut set = Self {
            shards: Vec::new(),
            members: Vec::new(),
            samples: Vec::new(),
            endings: Vec::new(),
            passed_over: PassedOver::default(),
            fingerprint: Fingerprint([0; 32]),
        };
        let (mut numbers, mut hasher) = (HashMap::new(), blake3::Hasher::new());
        for path in expand(pattern)? {
            set.shards.push(Shard { path: path.clone(), members: set.members.len() as u32 });
            let passed_over = scan(&path, |found| {
                if found.first {
                    set.samples.push(set.members.len() as u32);
                    hasher.update(&(found.key.len() as u64).to_le_bytes()).update(found.key.as_bytes());
                }
                hasher.update(&(found.ending.len() as u64).to_le_bytes()).update(found.ending.as_bytes());
                hasher.update(&found.bytes.to_le_bytes());
                let next = numbers.len() as u16;
                let ending = *numbers.entry(found.ending).or_insert_with_key(|ending| {
                    set.endings.push(ending.clone());
                    next
                });
                set.members.push(Member { block: found.block, bytes: found.bytes, ending });
                let is_full = set.members.len() == u32::MAX as usize || numbers.len() > u16::MAX.into();
                match is_full {
                    true => Err(DataError::invalid(
                        &path,
                        "(file)",
                        format!("too many members ({}) or extensions ({})", set.members.len(), numbers.len()),
                        "use fewer shards, or rename files: the part of a name that differs between \
                         samples must come before the first dot",
                    )),
                    false => Ok(()),
                }
            })?;
            set.passed_over.not_files += passed_over.not_files;
            set.passed_over.unnamed += passed_over.unnamed;
        }
        set.fingerprint = Fingerprint(*hasher.finalize().as_bytes());
        Ok(set)
    }

    /// Samples.
    pub fn len(&self) -> u64 {
        self.samples.len() as u64
    }

    /// True if no shard has a sample.
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// Names keys, endings and sizes of all members, in order. Of contents, and of which shard has what, it
    /// knows nothing.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// What there is, for people.
    pub fn describe(&self) -> String {
        match &*self.shards {
            [one] => format!("in {}", one.path.display()),
            [first, .., last] => {
                format!(
                    "in {} shards, {} to {}",
                    self.shards.len(),
                    first.path.display(),
                    last.path.display()
                )
            }
            [] => String::new(),
        }
    }

    /// What was passed over and is probably not meant so: a line each.
    pub fn warnings(&self) -> Vec<String> {
        let PassedOver { not_files, unnamed } = self.passed_over;
        let mut warnings = Vec::new();
        if not_files > 0 {
            warnings.push(format!(
                "links and devices in the shards are skipped ({not_files} in all); write the \
                 shards with `tar --dereference` to include the files"
            ));
        }
        if unnamed > 0 {
            warnings.push(format!(
                "hidden files and files without an extension in the shards are skipped ({unnamed} in all)"
            ));
        }
        warnings
    }

    /// The members of a sample, in the order of its shard.
    pub fn members(&self, sample: u64) -> impl DoubleEndedIterator<Item = MemberId> + use<> {
        let at =
            |sample: u64| usize::try_from(sample).ok().and_then(|sample| self.samples.get(sample)).copied();
        let all = self.members.len() as u32;
        let first = at(sample).unwrap_or(all);
        (first..at(sample.saturating_add(1)).unwrap_or(all)).map(MemberId)
    }

    /// What stands behind the first dot of a member's name, in lower case.
    pub fn ending(&self, member: MemberId) -> &str {
        &self.endings[self.member(member).ending as usize]
    }

    /// Bytes of a member.
    pub fn bytes(&self, member: MemberId) -> u64 {
        self.member(member).bytes.into()
    }

    /// The member of a sample with this ending.
    pub fn with_ending(&self, sample: u64, ending: &str) -> Option<MemberId> {
        self.members(sample).find(|member| self.ending(*member) == ending)
    }

    /// The content of a member.
    pub fn read_member(&self, member: MemberId) -> Result<Vec<u8>, DataError> {
        self.head(member, u64::MAX)
    }

    /// The first bytes of a member, at most so many.
    pub fn head(&self, member: MemberId, most: u64) -> Result<Vec<u8>, DataError> {
        let Member { block, bytes, .. } = *self.member(member);
        if most > LARGEST.into() && bytes > LARGEST {
            let found = format!("has {bytes} bytes, but at most {LARGEST} are read at once");
            return Err(self.fault(member, found, "make it smaller, or remove the sample"));
        }
        let mut content = vec![0; u64::from(bytes).min(most) as usize];
        let read = self.file(member)?.read_exact_at(&mut content, u64::from(block) * BLOCK);
        read.map_err(DataError::io(&self.shard(member).path, "read"))?;
        Ok(content)
    }

    /// A member as a file of its own.
    pub fn section(&self, member: MemberId) -> Result<Section, DataError> {
        let Member { block, bytes, .. } = *self.member(member);
        Ok(Section::new(self.file(member)?, u64::from(block) * BLOCK, bytes.into()))
    }

    /// What is wrong with a member, and the remedy.
    pub fn fault(&self, member: MemberId, found: impl Into<String>, remedy: impl Into<String>) -> DataError {
        DataError::invalid(&self.shard(member).path, self.place(member), found, remedy)
    }

    /// The shard of a member.
    pub fn path(&self, member: MemberId) -> &Path {
        &self.shard(member).path
    }

    /// A member within its shard, for people.
    pub fn place(&self, member: MemberId) -> String {
        let at = self.header(member);
        let file = bounded::open(&self.shard(member).path);
        let header = file.ok().and_then(|file| header_at(&file, &self.shard(member).path, at).ok());
        match header {
            Some(header) => format!("`{}` at {}", name_in(&header).display(), at_byte(at)),
            None => format!("the .{} at {}", self.ending(member), at_byte(at)),
        }
    }

    /// The shard of a member, which has the size there that it had when it was scanned.
    fn file(&self, member: MemberId) -> Result<File, DataError> {
        let (path, at) = (&self.shard(member).path, self.header(member));
        let file = bounded::open(path).map_err(DataError::io(path, "read"))?;
        let header = header_at(&file, path, at)?;
        match header.entry_size().ok() == Some(self.bytes(member)) {
            true => Ok(file),
            false => {
                let found = "the member has changed since the run began";
                Err(DataError::invalid(path, at_byte(at), found, "restore the shard"))
            }
        }
    }

    fn header(&self, member: MemberId) -> u64 {
        u64::from(self.member(member).block - 1) * BLOCK
    }

    fn member(&self, member: MemberId) -> &Member {
        &self.members[member.0 as usize]
    }

    fn shard(&self, member: MemberId) -> &Shard {
        &self.shards[self.shards.partition_point(|shard| shard.members <= member.0) - 1]
    }
}
