//! Files of tokens: read, checked, written.
//!
//! ```text
//! # one a line
//! cox_all_…
//! cox_read_…
//! name:prometheus.example=read        a certificate's name (with COX_TLS_CA) and what it grants
//! ```

use std::{
    fs,
    io::{ErrorKind, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::Path,
    thread,
    time::Duration,
};

use coxswain_proto::{bounded, first};

use crate::{IdentityError, Scope, Token, owner::is_ours};

/// Most bytes of a token file.
const MAX_BYTES: u64 = 1 << 16;
/// Most lines that grant something: each is compared with what every caller presents.
const MAX_LINES: usize = 256;
/// Read and written by its owner alone.
const PRIVATE: u32 = 0o600;
/// How long one line takes to be written, at most.
const MAKING: Duration = Duration::from_millis(500);

/// What a file grants, and to whom.
#[derive(Clone, Debug, Default)]
pub(crate) struct FileGrants {
    pub tokens: Vec<Token>,
    /// Names of certificates.
    pub names: Vec<(String, Scope)>,
}

/// What tells one content of a file from the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    device: u64,
    file: u64,
    length: u64,
    modified_s: i64,
    modified_ns: i64,
    mode: u32,
}

/// When the file at `path` was written last; nothing where there is none.
pub(crate) fn stamp(path: &Path) -> Option<Stamp> {
    let found = fs::metadata(path).ok()?;
    Some(Stamp {
        device: found.dev(),
        file: found.ino(),
        length: found.len(),
        modified_s: found.mtime(),
        modified_ns: found.mtime_nsec(),
        mode: found.mode(),
    })
}

/// Reads a file of tokens. One that others may read or own is refused.
pub(crate) fn read(path: &Path) -> Result<FileGrants, IdentityError> {
    check_privacy(path)?;
    read_open(path)
}

/// Reads a file of tokens, even one that others may read.
pub(crate) fn read_open(path: &Path) -> Result<FileGrants, IdentityError> {
    parse(path, &bounded::read_piped_text(path, MAX_BYTES).map_err(|error| IdentityError::file(path, error))?)
}

fn check_privacy(path: &Path) -> Result<(), IdentityError> {
    let failed = |error: std::io::Error| IdentityError::file(path, error);
    let found = fs::metadata(path).map_err(failed)?;
    if found.mode() & 0o077 != 0 {
        return Err(IdentityError::OpenToOthers { path: path.to_owned(), mode: found.mode() & 0o7777 });
    }
    if !is_ours(&found) {
        return Err(IdentityError::NotOurs { path: path.to_owned(), owner: found.uid() });
    }
    Ok(())
}

fn parse(path: &Path, text: &str) -> Result<FileGrants, IdentityError> {
    let mut granted = FileGrants::default();
    let lines = text.lines().enumerate().map(|(at, line)| (at + 1, line.trim()));
    for (line, entry) in lines.filter(|(_, entry)| !entry.is_empty() && !entry.starts_with('#')) {
        let wrong = |problem: String| IdentityError::Line { path: path.to_owned(), line, problem };
        match entry.strip_prefix("name:") {
            Some(named) => {
                let expected = || wrong("expected name:NAME=SCOPE".to_owned());
                let (name, scope) = named.split_once('=').ok_or_else(expected)?;
                if name.is_empty() {
                    return Err(expected());
                }
                granted.names.push((name.to_owned(), scope.parse().map_err(wrong)?));
            }
            None => granted.tokens.push(Token::parse(entry).map_err(|error| wrong(error.to_string()))?),
        }
        if granted.tokens.len() + granted.names.len() > MAX_LINES {
            return Err(wrong(format!("more than {MAX_LINES} tokens and names; remove some")));
        }
    }
    if granted.tokens.is_empty() {
        return Err(IdentityError::file(path, "there is no token in it; `cox token --file` adds one"));
    }
    Ok(granted)
}

/// Adds a token to a file, which is made if there is none. As with reading, one that others may read or own
/// is refused.
pub(crate) fn add(path: &Path, token: &Token) -> Result<(), IdentityError> {
    let failed = |error: std::io::Error| IdentityError::file(path, error);
    if path.exists() {
        check_privacy(path)?;
    }
    let before = match bounded::read(path, MAX_BYTES) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(failed(error)),
    };
    let mut open = fs::OpenOptions::new();
    let mut file = open.create(true).append(true).mode(PRIVATE).open(path).map_err(failed)?;
    let gap = if before.last().is_none_or(|last| *last == b'\n') { "" } else { "\n" };
    file.write_all(format!("{gap}{}\n", token.secret()).as_bytes()).map_err(failed)
}

/// A file with one fresh token of all scopes, unless there is a private one already. The first of several
/// processes makes it; where the file system has links, none ever sees half of it. True if it is private:
/// some file systems (SMB, buckets mounted as directories) keep neither owners nor permissions.
pub(crate) fn make(path: &Path) -> Result<bool, IdentityError> {
    if path.exists() && check_privacy(path).is_err() {
        // Somebody may have read it. Where it cannot be removed, it is read as it is.
        let _ = fs::remove_file(path);
    }
    // Its maker is at it, or was killed at it.
    if is_part(path) {
        thread::sleep(MAKING);
        if is_part(path) {
            let _ = fs::remove_file(path);
        }
    }
    if !path.exists() {
        let content = format!("{}\n", Token::fresh(Scope::All)?.secret());
        first::make(path, PRIVATE, content.as_bytes()).map_err(|error| IdentityError::file(path, error))?;
    }
    Ok(check_privacy(path).is_ok())
}

/// Whether it breaks off before its first token ends, as only a file system without links shows it.
fn is_part(path: &Path) -> bool {
    let text = bounded::read_text(path, MAX_BYTES);
    text.is_ok_and(|text| !text.ends_with('\n') && parse(path, &text).is_err())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn private(path: &Path, text: &str) {
        fs::write(path, text).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    }

    #[test]
    fn a_file_that_others_may_read_is_refused_and_says_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        assert!(make(&path).unwrap());
        assert_eq!(read(&path).unwrap().tokens.len(), 1);
        for mode in [0o644, 0o640, 0o660, 0o604] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let refused = read(&path).unwrap_err().to_string();
            assert!(refused.contains("chmod 600") && refused.contains(&format!("{mode:04o}")), "{refused}");
            assert!(matches!(
                add(&path, &Token::fresh(Scope::Read).unwrap()),
                Err(IdentityError::OpenToOthers { .. })
            ));
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
        assert_eq!(read(&path).unwrap().tokens.len(), 1);
    }

    #[test]
    fn a_file_of_somebody_else_is_not_added_to() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        assert!(make(&path).unwrap());
        // Only root can give a file away.
        if std::os::unix::fs::chown(&path, Some(1000), None).is_ok()
            && fs::metadata("/proc/self").unwrap().uid() == 0
        {
            let before = fs::read(&path).unwrap();
            let refused = add(&path, &Token::fresh(Scope::Read).unwrap()).unwrap_err();
            assert!(matches!(refused, IdentityError::NotOurs { owner: 1000, .. }), "{refused}");
            assert_eq!(fs::read(&path).unwrap(), before);
        }
    }

    #[test]
    fn lines_are_tokens_names_or_remarks_and_anything_else_is_named_by_its_line_and_not_shown() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        private(
            &path,
            "# ours\n\n cox_read_0123456789abcdef0123456789abcdef \nname:prometheus.example=read\n",
        );
        let granted = read(&path).unwrap();
        assert_eq!(granted.tokens.iter().map(Token::scope).collect::<Vec<_>>(), [Scope::Read]);
        assert_eq!(granted.names, [("prometheus.example".to_owned(), Scope::Read)]);
        for (text, expected) in [
            ("# none\n", "no token in it"),
            ("\ncox_read_beef\n", "line 2: the token is too short"),
            ("name:a\n", "line 1: expected name:NAME=SCOPE"),
            ("name:a=root\n", "line 1: root: expected read"),
        ] {
            private(&path, text);
            let refused = read(&path).unwrap_err().to_string();
            assert!(refused.contains(expected) && !refused.contains("beef"), "{refused}");
        }
        private(&path, &"cox_read_0123456789abcdef0123456789abcdef\n".repeat(257));
        assert!(read(&path).unwrap_err().to_string().contains("more than 256"));
        private(&path, &"#".repeat(1 << 17));
        assert!(read(&path).unwrap_err().to_string().contains("more than 65536 bytes"));
        assert!(read(&dir.path().join("none")).unwrap_err().to_string().contains("No such file"));
    }

    #[test]
    fn what_a_killed_process_has_left_of_a_fresh_token_is_replaced_and_nothing_else_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        for part in ["", "cox_all_0123"] {
            private(&path, part);
            assert!(make(&path).unwrap());
            assert_eq!(read(&path).unwrap().tokens.len(), 1, "{part:?}");
        }
        for theirs in ["cox_read_0123456789abcdef0123456789abcdef", "# of a person, who is not done\n"] {
            private(&path, theirs);
            assert!(make(&path).unwrap());
            assert_eq!(fs::read_to_string(&path).unwrap(), theirs);
        }
    }

    #[test]
    fn a_file_is_made_once_and_added_to() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        std::thread::scope(|scope| (0..8).for_each(|_| drop(scope.spawn(|| assert!(make(&path).unwrap())))));
        let first = read(&path).unwrap().tokens;
        assert_eq!((first.len(), first[0].scope()), (1, Scope::All));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "drafts are gone");
        add(&path, &Token::fresh(Scope::Read).unwrap()).unwrap();
        private(&path, fs::read_to_string(&path).unwrap().trim_end());
        add(&path, &Token::fresh(Scope::Worker).unwrap()).unwrap();
        let scopes: Vec<_> = read(&path).unwrap().tokens.iter().map(Token::scope).collect();
        assert_eq!(scopes, [Scope::All, Scope::Read, Scope::Worker]);
        // One that others may have read is replaced.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(read_open(&path).unwrap().tokens.len(), 3);
        assert!(make(&path).unwrap());
        let again = read(&path).unwrap().tokens;
        assert!(again.len() == 1 && !again[0].is(first[0].secret()));
        let other = dir.path().join("other");
        add(&other, &Token::fresh(Scope::Read).unwrap()).unwrap();
        assert_eq!(fs::metadata(&other).unwrap().mode() & 0o777, 0o600);
    }
}
