//! One token: a secret of at least 128 bits, and what it grants.
//!
//! `cox token` makes `cox_SCOPE_` and 40 hexadecimal digits, so that a token says what it is good for and
//! scanners of leaked secrets can find it. A secret of the user's own has no such beginning and grants all.

use std::fmt;

use crate::{IdentityError, Scope};

/// What a token of ours begins with, before its scope.
const PREFIX: &str = "cox_";
/// Bytes of randomness in a fresh token: 160 bits.
const FRESH: usize = 20;
/// Fewest characters of a secret: hexadecimal digits have 4 bits each, letters and digits almost 6.
const LEAST_HEX: usize = 32;
/// See [`LEAST_HEX`].
const LEAST: usize = 22;
/// Most characters of a token.
const MOST: usize = 256;

/// A secret, and what it grants. `Debug` shows the scope alone.
#[derive(Clone)]
pub struct Token {
    text: String,
    scope: Scope,
}

impl Token {
    /// A fresh one, from the kernel's randomness.
    pub fn fresh(scope: Scope) -> Result<Self, IdentityError> {
        let digits: String = random::<FRESH>()?.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { text: format!("{PREFIX}{scope}_{digits}"), scope })
    }

    /// Reads one. It is refused if it has fewer than 128 bits at most.
    pub fn parse(text: &str) -> Result<Self, IdentityError> {
        if text.len() > MOST || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(IdentityError::Characters { most: MOST });
        }
        let ours = text.strip_prefix(PREFIX).and_then(|rest| rest.split_once('_'));
        let known = ours.and_then(|(scope, secret)| Some((scope.parse().ok()?, secret)));
        let (scope, secret) = known.unwrap_or((Scope::All, text));
        let hex = secret.bytes().all(|byte| byte.is_ascii_hexdigit());
        if secret.len() < if hex { LEAST_HEX } else { LEAST } {
            return Err(IdentityError::Short);
        }
        Ok(Self { text: text.to_owned(), scope })
    }

    /// The secret itself, for `authorization` and for files.
    pub fn secret(&self) -> &str {
        &self.text
    }

    /// What it grants.
    pub fn scope(&self) -> Scope {
        self.scope
    }

    /// A key that follows from it, another one for each purpose: BLAKE3's key derivation.
    pub fn key(&self, purpose: &str) -> [u8; 32] {
        blake3::derive_key(purpose, self.text.as_bytes())
    }

    /// What it may be called in the open: eight bytes that follow from it and say nothing about it.
    pub fn name(&self) -> [u8; 8] {
        let key = self.key("coxswain 2026-11-23 the public name of a token");
        std::array::from_fn(|at| key[at])
    }

    /// Whether `presented` is this token, in a time that does not tell where they differ.
    pub fn is(&self, presented: &str) -> bool {
        // Hashes are compared in constant time.
        blake3::hash(presented.as_bytes()) == blake3::hash(self.text.as_bytes())
    }
}

impl fmt::Debug for Token {
    /// Without the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token").field("scope", &self.scope).finish_non_exhaustive()
    }
}

/// Bytes of the kernel's randomness.
pub fn random<const N: usize>() -> Result<[u8; N], IdentityError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(IdentityError::Random)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fresh_token_says_what_it_grants_and_is_like_no_other() {
        for scope in Scope::EACH {
            let token = Token::fresh(scope).unwrap();
            assert!(token.secret().starts_with(&format!("cox_{scope}_")));
            assert_eq!(Token::parse(token.secret()).unwrap().scope(), scope);
            let other = Token::fresh(scope).unwrap();
            assert!(token.is(token.secret()) && !token.is(other.secret()));
            assert_ne!((token.name(), token.key("a")), (other.name(), other.key("a")));
            assert_ne!(token.key("a"), token.key("b"));
        }
    }

    #[test]
    fn what_can_be_guessed_or_not_be_sent_is_no_token() {
        for short in ["", "secret", "cox_read_00", "0123456789abcdef0123456789abcde", "cox_all_"] {
            assert!(matches!(Token::parse(short), Err(IdentityError::Short)), "{short}");
        }
        let long = "a".repeat(257);
        for wrong in ["a token with blanks in it, and long", "schlüssel-schlüssel-schlüssel", long.as_str()]
        {
            assert!(matches!(Token::parse(wrong), Err(IdentityError::Characters { .. })), "{wrong}");
        }
        // `openssl rand -hex 16`, and one of a password manager.
        for own in ["0123456789abcdef0123456789abcdef", "correct-horse-battery-staple"] {
            assert_eq!(Token::parse(own).unwrap().scope(), Scope::All);
        }
        // A beginning that is no scope of ours is part of the secret.
        assert_eq!(Token::parse("cox_admin_correct-horse-battery").unwrap().scope(), Scope::All);
    }

    #[test]
    fn a_token_is_never_shown() {
        let token = Token::fresh(Scope::Read).unwrap();
        let shown = format!("{token:?}");
        assert!(shown.contains("Read") && !shown.contains(&token.secret()[9..]), "{shown}");
    }
}
