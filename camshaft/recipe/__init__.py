"""Read, check and build recipes. Importing this does not import torch."""

from camshaft.recipe.build import build_callbacks as build_callbacks
from camshaft.recipe.build import build_data as build_data
from camshaft.recipe.build import build_loggers as build_loggers
from camshaft.recipe.build import build_module as build_module
from camshaft.recipe.build import build_optimizer as build_optimizer
from camshaft.recipe.build import build_scheduler as build_scheduler
from camshaft.recipe.build import build_strategy as build_strategy
from camshaft.recipe.problems import Origin as Origin
from camshaft.recipe.recipe import Recipe as Recipe
from camshaft.recipe.recipe import load as load
from camshaft.recipe.settings import Launch as Launch
from camshaft.recipe.settings import Settings as Settings
from camshaft.recipe.settings import Validate as Validate

__all__ = [
    "Launch",
    "Origin",
    "Recipe",
    "Settings",
    "Validate",
    "build_callbacks",
    "build_data",
    "build_loggers",
    "build_module",
    "build_optimizer",
    "build_scheduler",
    "build_strategy",
    "load",
]
