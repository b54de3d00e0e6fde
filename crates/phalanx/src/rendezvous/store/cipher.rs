//! Optional encryption of a connection: TLS 1.3 (rustls) between the greetings and the frames.
//!
//! There are no certificates. The store shows a key that it made at its start, and the client takes any: the
//! token authenticates both sides. For that, the keys of the frames depend on secrets of this very TLS
//! session ([`Cipher::binding`], RFC 9266), so that a man in the middle, with two sessions, cannot pass
//! frames from one to the other.
//!
//! This module only turns bytes into bytes; the owner of the socket moves them.

use crate::rendezvous::environment::switch;
use crate::types::error::Result;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::sign::CertifiedKey;
use rustls::{
    ClientConfig, ClientConnection, Connection, DigitallySignedStruct, ServerConfig, ServerConnection,
    SignatureScheme,
};
use std::io::{self, ErrorKind, Read, Write};
use std::sync::Arc;

/// Secret that only the two ends of a TLS session know; empty without TLS.
pub type Binding = Vec<u8>;

/// Whether connections are encrypted, from the value of `PHALANX_STORE_TLS`, if it is set.
pub fn encrypted_from(value: Option<&str>) -> Result<bool> {
    Ok(switch("PHALANX_STORE_TLS", value.map(str::trim))?.unwrap_or(false))
}

/// One end of a connection's encryption.
pub struct Cipher(Option<Connection>);

/// A store's key.
#[derive(Clone)]
pub struct Identity(Arc<ServerConfig>);

impl Identity {
    /// Creates a key.
    pub fn new() -> io::Result<Identity> {
        let key = ring::signature::Ed25519KeyPair::generate_pkcs8(&ring::rand::SystemRandom::new())
            .map_err(|_| io::Error::other("no key could be made"))?;
        let key = PrivatePkcs8KeyDer::from(key.as_ref().to_vec());
        let provider = provider();
        let key = provider.key_provider.load_private_key(key.into()).map_err(io::Error::other)?;
        let public = key.public_key().ok_or_else(|| io::Error::other("a key without a public half"))?;
        let certified = CertifiedKey::new(vec![CertificateDer::from(public.to_vec())], key);
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(io::Error::other)?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(Arc::new(certified))));
        // Sessions are never resumed.
        config.send_tls13_tickets = 0;
        Ok(Identity(Arc::new(config)))
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

impl Cipher {
    /// No encryption.
    pub const NONE: Cipher = Cipher(None);

    /// A client's end.
    pub fn client() -> io::Result<Cipher> {
        let provider = provider();
        let verifier = AnyKey(provider.signature_verification_algorithms);
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(io::Error::other)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_no_client_auth();
        config.resumption = rustls::client::Resumption::disabled();
        config.enable_sni = false;
        let name = ServerName::try_from("phalanx.invalid").expect("a name");
        let connection = ClientConnection::new(Arc::new(config), name).map_err(io::Error::other)?;
        Ok(Cipher::over(connection.into()))
    }

    /// The store's end.
    pub fn server(identity: &Identity) -> io::Result<Cipher> {
        let connection = ServerConnection::new(identity.0.clone()).map_err(io::Error::other)?;
        Ok(Cipher::over(connection.into()))
    }

    fn over(mut connection: Connection) -> Cipher {
        // Unsent bytes are limited by the owner of the socket.
        connection.set_buffer_limit(None);
        Cipher(Some(connection))
    }

    /// Whether it encrypts.
    pub fn encrypts(&self) -> bool {
        self.0.is_some()
    }

    /// Returns the session's secret, once the handshake is complete.
    pub fn binding(&self) -> Option<Binding> {
        let Some(connection) = &self.0 else { return Some(Binding::new()) };
        if connection.is_handshaking() {
            return None;
        }
        connection.export_keying_material(vec![0; 32], b"EXPORTER-Channel-Binding", None).ok()
    }

    /// Decrypts bytes from the network. Appends the plain text to `plain`, and TLS's own replies to `wire`.
    pub fn open(&mut self, bytes: &[u8], plain: &mut Vec<u8>, wire: &mut Vec<u8>) -> io::Result<()> {
        let Some(connection) = &mut self.0 else {
            plain.extend_from_slice(bytes);
            return Ok(());
        };
        let mut rest = bytes;
        while !rest.is_empty() {
            connection.read_tls(&mut rest)?;
            connection.process_new_packets().map_err(|e| io::Error::new(ErrorKind::InvalidData, e))?;
            match connection.reader().read_to_end(plain) {
                Err(e) if e.kind() != ErrorKind::WouldBlock => return Err(e),
                _ => {}
            }
        }
        self.flush(wire)
    }

    /// Encrypts `plain` and appends it to `wire`.
    pub fn seal(&mut self, plain: &[u8], wire: &mut Vec<u8>) -> io::Result<()> {
        let Some(connection) = &mut self.0 else {
            wire.extend_from_slice(plain);
            return Ok(());
        };
        connection.writer().write_all(plain)?;
        self.flush(wire)
    }

    /// Appends TLS's own messages to `wire`, such as a client's first handshake message.
    pub fn flush(&mut self, wire: &mut Vec<u8>) -> io::Result<()> {
        if let Some(connection) = &mut self.0 {
            while connection.wants_write() {
                connection.write_tls(wire)?;
            }
        }
        Ok(())
    }
}

/// Accepts any key: the token authenticates the store, with the [binding](Cipher::binding).
#[derive(Debug)]
struct AnyKey(WebPkiSupportedAlgorithms);

impl ServerCertVerifier for AnyKey {
    fn verify_server_cert(
        &self,
        _key: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("only TLS 1.3 is spoken".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signature, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Exchanges bytes between two ends until neither has more to send; returns what each received.
    fn talk(ends: &mut [Cipher; 2], wires: &mut [Vec<u8>; 2]) -> [Vec<u8>; 2] {
        let mut plain = [Vec::new(), Vec::new()];
        while wires.iter().any(|wire| !wire.is_empty()) {
            for (from, to) in [(0, 1), (1, 0)] {
                let bytes = std::mem::take(&mut wires[from]);
                ends[to].open(&bytes, &mut plain[to], &mut wires[to]).unwrap();
            }
        }
        plain
    }

    fn pair() -> [Cipher; 2] {
        let mut ends = [Cipher::client().unwrap(), Cipher::server(&Identity::new().unwrap()).unwrap()];
        let mut wires = [Vec::new(), Vec::new()];
        assert!(ends[0].binding().is_none() && ends[1].binding().is_none(), "they have not met");
        ends[0].flush(&mut wires[0]).unwrap();
        talk(&mut ends, &mut wires);
        ends
    }

    #[test]
    fn both_ends_share_a_binding_that_no_other_session_has() {
        let ([client, server], [other, _]) = (pair(), pair());
        assert_eq!(client.binding().unwrap(), server.binding().unwrap());
        assert_ne!(client.binding(), other.binding());
        assert_eq!(Cipher::NONE.binding(), Some(Binding::new()));
    }

    #[test]
    fn what_is_said_arrives_and_cannot_be_read_on_the_way() {
        let mut ends = pair();
        let secret = b"the id of a communicator".repeat(10_000);
        let mut wires = [Vec::new(), Vec::new()];
        ends[0].seal(&secret, &mut wires[0]).unwrap();
        ends[1].seal(b"yes", &mut wires[1]).unwrap();
        assert!(!wires[0].windows(12).any(|window| secret.starts_with(window)), "it can be read");
        assert_eq!(talk(&mut ends, &mut wires), [b"yes".to_vec(), secret]);
    }

    #[test]
    fn changed_bytes_are_refused() {
        let mut ends = pair();
        let mut wire = Vec::new();
        ends[0].seal(b"all", &mut wire).unwrap();
        *wire.last_mut().unwrap() ^= 1;
        let refused = ends[1].open(&wire, &mut Vec::new(), &mut Vec::new()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidData);
    }

    #[test]
    fn settings_are_0_or_1() {
        assert!(!encrypted_from(None).unwrap() && !encrypted_from(Some("0")).unwrap());
        assert!(encrypted_from(Some(" 1 ")).unwrap());
        assert!(encrypted_from(Some("yes")).unwrap_err().to_string().contains("PHALANX_STORE_TLS"));
    }
}
