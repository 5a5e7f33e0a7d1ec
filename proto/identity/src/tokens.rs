//! The tokens that are valid now: one that does not change, or those of a file.
//!
//! A thread looks once a second whether the file has changed. What is new in it counts at once. What is gone
//! from it counts for [`GRACE`] more seconds: a network file system may show a change to some machines a
//! minute later than to others, and nobody is to be refused for showing what their machine still sees. A file
//! that cannot be used any more (others may read it, a line is wrong) is named in the log, and what was read
//! before stays.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, Weak},
    thread,
    time::Duration,
};

use crate::{
    IdentityError, Scope, Token,
    file::{self, FileGrants, Stamp},
};

/// Between two looks at a file.
const LOOK: Duration = Duration::from_secs(1);
/// Looks for which a token counts after it has left its file. NFS asks its server after at most 60 seconds.
const GRACE: u32 = 90;

/// Tokens that are valid now. Clones share them.
#[derive(Clone)]
pub struct Tokens(Arc<RwLock<TokenTable>>);

struct TokenTable {
    granted: FileGrants,
    /// Gone from the file, and for how many looks they still count.
    leaving: Vec<(Token, u32)>,
    /// The file as it was when it was looked at last.
    stamp: Option<Stamp>,
    /// Whether it could not be read then: that may pass without a change of the file.
    unread: bool,
}

impl Tokens {
    /// This one, for as long as the process lives.
    pub fn one(token: Token) -> Self {
        let granted = FileGrants { tokens: vec![token], names: Vec::new() };
        Self(Arc::new(RwLock::new(TokenTable { granted, leaving: Vec::new(), stamp: None, unread: false })))
    }

    /// The tokens of a file, which is read again whenever it changes.
    pub fn of_file(path: &Path) -> Result<Self, IdentityError> {
        let stamp = file::stamp(path);
        let held = TokenTable { granted: file::read(path)?, leaving: Vec::new(), stamp, unread: false };
        let tokens = Self(Arc::new(RwLock::new(held)));
        let (watched, watched_path) = (Arc::downgrade(&tokens.0), path.to_owned());
        thread::Builder::new()
            .name("tokens".into())
            .spawn(move || watch(&watched, watched_path))
            .map_err(|error| IdentityError::file(path, format!("no thread can be started: {error}")))?;
        Ok(tokens)
    }

    /// The tokens of a file, which gets one fresh token of all scopes if it was not there before. Where the
    /// file system lets others read it, that is logged, and the file is read once.
    pub fn of_own_file(path: &Path) -> Result<Self, IdentityError> {
        if file::make(path)? {
            return Self::of_file(path);
        }
        tracing::warn!(
            "{}: this file system has no permissions, so everyone who can read this directory can control \
             the run; to prevent that, set COX_TOKEN, or COX_TOKEN_FILE on another file system",
            path.display()
        );
        Self::of_open_file(path)
    }

    /// The tokens of a file that others may read, too, where a file system keeps no permissions.
    pub fn of_open_file(path: &Path) -> Result<Self, IdentityError> {
        let held =
            TokenTable { granted: file::read_open(path)?, leaving: Vec::new(), stamp: None, unread: false };
        Ok(Self(Arc::new(RwLock::new(held))))
    }

    /// Adds a token to a file, which is made if there is none.
    pub fn add_to_file(path: &Path, token: &Token) -> Result<(), IdentityError> {
        file::add(path, token)
    }

    /// What `presented` grants; nothing if it is none of these.
    pub fn scope_of(&self, presented: &str) -> Option<Scope> {
        self.held().valid().find(|token| token.is(presented)).map(Token::scope)
    }

    /// The one to show where `wanted` is asked for; any where none grants it, which is refused by name.
    pub fn for_scope(&self, wanted: Scope) -> Option<Token> {
        let held = self.held();
        let tokens = &held.granted.tokens;
        tokens.iter().find(|token| token.scope().grants(wanted)).or(tokens.first()).cloned()
    }

    /// The valid one with this public name that grants `wanted`.
    pub fn named(&self, name: [u8; 8], wanted: Scope) -> Option<Token> {
        self.held().valid().find(|token| token.name() == name && token.scope().grants(wanted)).cloned()
    }

    /// Names of certificates, and what they grant.
    pub fn names(&self) -> Vec<(String, Scope)> {
        self.held().granted.names.clone()
    }

    /// Whether somebody could show this scope.
    pub fn require(&self, wanted: Scope) -> Result<(), IdentityError> {
        let granted = self.held().granted.tokens.iter().any(|token| token.scope().grants(wanted));
        if granted { Ok(()) } else { Err(IdentityError::Missing(wanted)) }
    }

    /// Takes a change of the file.
    fn look(&self, path: &Path) {
        let stamp = file::stamp(path);
        let (changed, unread) = {
            let held = self.held();
            (stamp != held.stamp, held.unread)
        };
        // Outside of the lock: a file system may take its time.
        let read = (changed || unread).then(|| file::read(path));
        let mut held = self.0.write().unwrap_or_else(PoisonError::into_inner);
        held.leaving.retain_mut(|(_, looks)| {
            *looks = looks.saturating_sub(1);
            *looks > 0
        });
        held.stamp = stamp;
        let Some(read) = read else { return };
        held.unread = read.is_err();
        match read {
            Ok(granted) => held.replace(granted),
            Err(error) if changed => {
                tracing::warn!(target: "coxswain::run", "{error}; the tokens that were read before stay valid");
            }
            // It was told.
            Err(_) => {}
        }
    }

    fn held(&self) -> RwLockReadGuard<'_, TokenTable> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

fn watch(watched: &Weak<RwLock<TokenTable>>, path: PathBuf) {
    loop {
        thread::sleep(LOOK);
        let Some(tokens) = watched.upgrade().map(Tokens) else { return };
        tokens.look(&path);
    }
}

impl TokenTable {
    fn valid(&self) -> impl Iterator<Item = &Token> {
        self.granted.tokens.iter().chain(self.leaving.iter().map(|(token, _)| token))
    }

    fn replace(&mut self, granted: FileGrants) {
        let stays = |token: &Token| granted.tokens.iter().any(|other| other.is(token.secret()));
        let gone: Vec<_> = self.granted.tokens.iter().filter(|token| !stays(token)).cloned().collect();
        self.leaving.retain(|(token, _)| !stays(token));
        self.leaving.extend(gone.into_iter().map(|token| (token, GRACE)));
        let (now, leaving) = (granted.tokens.len(), self.leaving.len());
        self.granted = granted;
        tracing::info!(
            target: "coxswain::run",
            "the token file has changed (tokens: {now}, removed but valid for up to {GRACE} s: {leaving})"
        );
    }
}

impl fmt::Debug for Tokens {
    /// How many there are.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held = self.held();
        f.debug_struct("Tokens")
            .field("valid", &held.granted.tokens.len())
            .field("leaving", &held.leaving.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt, time::Instant};

    use super::*;

    fn write(path: &Path, tokens: &[&Token], mode: u32) {
        let text: String = tokens.iter().map(|token| format!("{}\n", token.secret())).collect();
        let draft = path.with_extension("new");
        fs::write(&draft, text).unwrap();
        fs::set_permissions(&draft, fs::Permissions::from_mode(mode)).unwrap();
        fs::rename(&draft, path).unwrap();
    }

    fn fresh(scope: Scope) -> Token {
        Token::fresh(scope).unwrap()
    }

    #[test]
    fn a_changed_file_counts_without_a_restart_and_what_has_left_it_counts_for_a_while() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        let (old, new) = (fresh(Scope::All), fresh(Scope::Control));
        write(&path, &[&old], 0o600);
        let tokens = Tokens::of_file(&path).unwrap();
        assert_eq!(tokens.scope_of(new.secret()), None);
        write(&path, &[&old, &new], 0o600);
        // By its own thread.
        let give_up = Instant::now() + Duration::from_secs(60);
        while tokens.scope_of(new.secret()).is_none() {
            assert!(Instant::now() < give_up, "the file is not read again");
            thread::yield_now();
        }
        assert_eq!(tokens.scope_of(old.secret()), Some(Scope::All));

        write(&path, &[&new], 0o600);
        tokens.look(&path);
        assert_eq!(tokens.scope_of(old.secret()), Some(Scope::All), "some machines still see the old file");
        assert!(tokens.for_scope(Scope::Read).unwrap().is(new.secret()), "but it is not shown any more");
        (0..GRACE).for_each(|_| tokens.look(&path));
        assert_eq!(tokens.scope_of(old.secret()), None);
        assert_eq!(tokens.scope_of(new.secret()), Some(Scope::Control));
    }

    #[test]
    fn a_file_that_went_bad_changes_nothing_until_it_is_good_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        let (old, new) = (fresh(Scope::All), fresh(Scope::All));
        write(&path, &[&old], 0o600);
        let tokens = Tokens::of_file(&path).unwrap();
        write(&path, &[&new], 0o644);
        tokens.look(&path);
        assert_eq!(tokens.scope_of(new.secret()), None, "others may have read it");
        fs::remove_file(&path).unwrap();
        tokens.look(&path);
        assert_eq!(tokens.scope_of(old.secret()), Some(Scope::All));
        write(&path, &[&new], 0o600);
        tokens.look(&path);
        assert_eq!(tokens.scope_of(new.secret()), Some(Scope::All));
    }

    #[test]
    fn a_file_that_could_not_be_read_for_a_moment_is_read_again_though_it_has_not_changed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        let (old, new) = (fresh(Scope::All), fresh(Scope::All));
        write(&path, &[&old, &old], 0o600);
        let tokens = Tokens::of_file(&path).unwrap();
        let text = format!("{}\n", new.secret());
        fs::write(&path, "#".repeat(text.len())).unwrap();
        let written = fs::metadata(&path).unwrap().modified().unwrap();
        tokens.look(&path);
        // What was not to be read is, under the same stamp.
        fs::write(&path, text).unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_modified(written).unwrap();
        tokens.look(&path);
        assert_eq!(tokens.scope_of(new.secret()), Some(Scope::All));
    }

    #[test]
    fn callers_show_the_first_token_that_grants_what_they_want() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        let [read, control, worker] = [Scope::Read, Scope::Control, Scope::Worker].map(fresh);
        write(&path, &[&read, &control, &worker], 0o600);
        let tokens = Tokens::of_file(&path).unwrap();
        for (wanted, shown) in [(Scope::Read, &read), (Scope::Control, &control), (Scope::Worker, &worker)] {
            assert!(tokens.for_scope(wanted).unwrap().is(shown.secret()), "{wanted}");
        }
        assert!(tokens.named(worker.name(), Scope::Worker).is_some());
        assert!(tokens.named(read.name(), Scope::Worker).is_none(), "a look is not a place in the ring");
        tokens.require(Scope::Worker).unwrap();
        assert!(Tokens::one(read).require(Scope::Worker).unwrap_err().to_string().contains("--scope worker"));
        assert!(!format!("{tokens:?}").contains(&control.secret()[13..]));
    }
}
