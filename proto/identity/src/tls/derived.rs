//! A key and a certificate that follow from a token.
//!
//! ```text
//! seed         = BLAKE3-derive-key("… TLS key of a token", token)       32 bytes
//! key          = Ed25519 from that seed (RFC 8032)
//! certificate  = X.509 of that key, signed by itself, for NAME.cox.internal, without an end
//! NAME         = the token's public name, 16 hexadecimal digits
//! ```

use std::sync::Arc;

use rcgen::{Certificate, CertificateParams, DistinguishedName, DnType, KeyPair, PKCS_ED25519, SerialNumber};
use rustls::{
    crypto::ring::sign::any_eddsa_type,
    pki_types::{PrivatePkcs8KeyDer, SubjectPublicKeyInfoDer},
    sign::{CertifiedKey, SigningKey},
};

use crate::{IdentityError, Token};

/// What a key's bytes follow after in PKCS #8, for Ed25519 (RFC 8410, section 7).
const PKCS8: [u8; 16] = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
/// What a token's public name stands before in TLS's server name. `.internal` is nobody's.
const DOMAIN: &str = ".cox.internal";

/// The server name that asks for the key of this token.
pub(super) fn server_name(token: &Token) -> String {
    let digits: String = token.name().iter().map(|byte| format!("{byte:02x}")).collect();
    digits + DOMAIN
}

/// The public name of the token whose key is asked for; nothing if the name is another's.
pub(super) fn asked_for(server_name: &str) -> Option<[u8; 8]> {
    let digits = server_name.strip_suffix(DOMAIN)?;
    let is_one = digits.len() == 16 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = u64::from_str_radix(digits, 16).ok().filter(|_| is_one)?;
    Some(number.to_be_bytes())
}

/// The certificate that follows from a token, as PEM, and the server name that asks for it: for clients that
/// are not `cox` and are to accept this certificate alone.
pub fn certificate(token: &Token) -> Result<(String, String), IdentityError> {
    let certificate = signed(token).ok_or(IdentityError::NoCertificates)?;
    Ok((certificate.pem(), server_name(token)))
}

/// Key and certificate of a token.
pub(super) fn certified(token: &Token) -> Option<Arc<CertifiedKey>> {
    let certificate = signed(token)?.der().clone();
    Some(Arc::new(CertifiedKey::new(vec![certificate], signing(&pkcs8(token))?)))
}

fn signed(token: &Token) -> Option<Certificate> {
    let pair = KeyPair::from_pkcs8_der_and_sign_algo(&pkcs8(token), &PKCS_ED25519).ok()?;
    let mut wanted = CertificateParams::new([server_name(token)]).ok()?;
    wanted.distinguished_name = DistinguishedName::new();
    wanted.distinguished_name.push(DnType::CommonName, "coxswain");
    // The same on both sides, and each time.
    wanted.serial_number = Some(SerialNumber::from_slice(&[1]));
    wanted.self_signed(&pair).ok()
}

/// The public key of a token.
pub(super) fn public_key(token: &Token) -> Option<SubjectPublicKeyInfoDer<'static>> {
    signing(&pkcs8(token))?.public_key().map(SubjectPublicKeyInfoDer::into_owned)
}

fn signing(der: &PrivatePkcs8KeyDer<'_>) -> Option<Arc<dyn SigningKey>> {
    any_eddsa_type(der).ok()
}

fn pkcs8(token: &Token) -> PrivatePkcs8KeyDer<'static> {
    let seed = token.key("coxswain 2026-11-23 the TLS key of a token");
    PrivatePkcs8KeyDer::from([&PKCS8[..], &seed[..]].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Scope;

    #[test]
    fn both_sides_derive_the_same_certificate_and_no_other_token_does() {
        let [ours, other] = [0, 1].map(|_| Token::fresh(Scope::All).unwrap());
        let again = Token::parse(ours.secret()).unwrap();
        let certificate = |token: &Token| certified(token).unwrap().cert[0].clone();
        assert_eq!(certificate(&ours), certificate(&again));
        assert_ne!(certificate(&ours), certificate(&other));
        assert_eq!(public_key(&ours), public_key(&again));
        assert_ne!(public_key(&ours), public_key(&other));
        assert_eq!(asked_for(&server_name(&ours)), Some(ours.name()));
        for name in ["node0", "cox.internal", "00.cox.internal", "+000000000000000.cox.internal"] {
            assert_eq!(asked_for(name), None, "{name}");
        }
    }

    /// Held against Python's `blake3` and `cryptography`: `blake3(token, derive_key_context=...)`, then
    /// `Ed25519PrivateKey.from_private_bytes(seed).public_key()`.
    #[test]
    fn the_key_of_a_token_is_what_other_implementations_derive() {
        let token = Token::parse("0123456789abcdef0123456789abcdef").unwrap();
        assert_eq!(server_name(&token), NAME);
        let key = public_key(&token).unwrap();
        let digits: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(digits, KEY);
    }

    const NAME: &str = "0ab134187e159359.cox.internal";
    const KEY: &str =
        "302a300506032b6570032100d3e3c63c0482098cb38e047078dc65dc11892f11c7abe5b08df68a71545988f2";
}
