"""Save, find and read checkpoints: whole or not there, of any strategy, without running code."""

from camshaft.checkpoint.checking import Found as Found
from camshaft.checkpoint.checking import PassedOver as PassedOver
from camshaft.checkpoint.entries import Entries as Entries
from camshaft.checkpoint.entries import Json as Json
from camshaft.checkpoint.entries import Shard as Shard
from camshaft.checkpoint.manifest import Manifest as Manifest
from camshaft.checkpoint.peers import Alone as Alone
from camshaft.checkpoint.peers import Peers as Peers
from camshaft.checkpoint.places import Location as Location
from camshaft.checkpoint.reader import Reader as Reader
from camshaft.checkpoint.reader import Spec as Spec
from camshaft.checkpoint.store import Store as Store

__all__ = [
    "Alone",
    "Entries",
    "Found",
    "Json",
    "Location",
    "Manifest",
    "PassedOver",
    "Peers",
    "Reader",
    "Shard",
    "Spec",
    "Store",
]
